"""The process of an actor: it holds one object, whose methods the driver calls."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from agentrl.processes.child import print_stacks_on_signal
from agentrl.processes.hosted import Arguments, ObjectHolder, listen
from agentrl.runtime.temporary import sweep

_LOGS = "agentrl-log-"
_UNREAD_S = 3600.0
"""How long a log of a process that has ended waits for the driver, which removes it when it has read it."""


class HostSettings(NamedTuple):
    """log: file for the output of the process; None = one of its machine's own. name: of that file.

    environment: variables that are set before anything is imported that reads them.
    """

    name: str
    log: Path | None
    environment: Mapping[str, str]


class Identity(NamedTuple):
    """The process on its machine. node: Ray's id of that. host: its address. log: the output there."""

    pid: int
    node: str
    host: str
    log: str


class ObjectHost:
    """The class of the actor: it holds an object.

    Calls of the object run one after the other; those of `call_beside` meanwhile.
    """

    def __init__(self, settings: HostSettings) -> None:
        os.environ.update(settings.environment)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._log = settings.log or _new_log(settings.name)
        _write_output_to(self._log)
        print_stacks_on_signal()
        self._holder = ObjectHolder()
        self._told = SimpleQueue[object]()
        listen(self._told.put)

    def identity(self) -> Identity:
        """This process."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Identity(os.getpid(), node, ray.util.get_node_ip_address(), str(self._log))

    def print_stacks(self) -> None:
        """Print the stacks of all threads of this process into its log."""
        os.kill(os.getpid(), signal.SIGUSR1)

    def told(self) -> list[object]:
        """What the object has told since the last call, after a wait for something."""
        messages = [self._told.get()]
        with suppress(Empty):
            while True:
                messages.append(self._told.get_nowait())
        return messages

    def create(self, target: str, arguments: Arguments) -> None:
        """Make the object. target: its class, or a function that makes it, as `package.module:name`."""
        self._holder.create(target, *arguments)

    def call(self, method: str, arguments: Arguments) -> object:
        """Call a method of the object."""
        return self._holder.call(method, *arguments)

    def call_beside(self, method: str, arguments: Arguments) -> object:
        """Call a method of the object while another call runs."""
        return self._holder.call(method, *arguments)


class LogReader:
    """The class of an actor that reads files of its machine for the driver."""

    def read(self, path: str, offset: int, num_bytes: int) -> bytes:
        """At most `num_bytes` of a file, from a byte on."""
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def remove(self, path: str) -> None:
        """Delete a file."""
        Path(path).unlink(missing_ok=True)


def _new_log(name: str) -> Path:
    """A file in the folder for temporary files, where all users can make files of any name before.

    Logs of processes whose driver was killed before it had read them are removed.
    """
    sweep(Path(tempfile.gettempdir()), _LOGS, unwritten_s=_UNREAD_S)
    descriptor, path = tempfile.mkstemp(".log", f"{_LOGS}{name}-")
    os.close(descriptor)
    return Path(path)


def _write_output_to(log: Path) -> None:
    """Write standard output and errors to a file; nothing is left in a buffer when this process is killed."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    # It is in use, for `sweep`, as long as any process has it as its output.
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
    logging.basicConfig(format="%(name)s: %(message)s", force=True)
    logging.getLogger("agentrl").setLevel(logging.INFO)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", write_through=True)
