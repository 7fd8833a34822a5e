"""Child processes, each with a private pipe to its parent (the driver), that end with the parent.

A process is `python -m MODULE FD ARGUMENT ..`; FD is its end of the pipe. It ignores Ctrl-C, SIGTERM and
SIGHUP, which are for the driver: terminals and schedulers send them to all processes of a run. It ends within
seconds of the driver, also where that was killed. An exception in it is the last message on its pipe.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from agentrl.runtime.files import compiler_caches

_STDERR = 2
_END_S = 5.0
_ORPHAN_GRACE_S = 4.0
_MAX_ERROR_CHARS = 300


class ProcessFailure(NamedTuple):
    """The last message of a failed process. error: type and message. at_s: in seconds since 1970."""

    error: str
    at_s: float


class Child:
    """A child process with the same module search path. log: the file for its output; None = this process's.

    variables: of its environment, over those of this process. pipe: this process's end.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.pipe, child_end = Pipe()
        with nullcontext() if log is None else log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(child_end.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[child_end.fileno()],
                env={
                    "OMP_NUM_THREADS": "1",
                    **compiler_caches(os.environ),
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    **variables,
                },
            )
        # Only the child holds its end: this end reports EOF once the child has ended.
        child_end.close()
        self.pid = self._process.pid

    def exit_description(self) -> str | None:
        """How the process ended, after a wait for its end. None = it is still running."""
        self.wait()
        code = self._process.poll()
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def wait(self) -> None:
        """Wait for the end of the process, at most 5 s."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def end(self) -> None:
        """Kill the process without waiting; its pipe reports EOF soon after."""
        self._process.kill()

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.pipe.close()
        self._process.kill()
        self._process.wait()


def print_stacks_on_signal() -> None:
    """Make this process print the stack of every thread to its standard error when it receives SIGUSR1.

    It goes on afterwards.
    """
    faulthandler.register(signal.SIGUSR1, file=_STDERR)


def follow_driver(pipe: Connection) -> None:
    """Make this process end with its parent, ignore Ctrl-C, SIGTERM and SIGHUP, and print its log.

    On SIGUSR1 it prints its stacks.
    """
    print_stacks_on_signal()
    # All are for the driver, which shuts its processes down in order.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("agentrl").setLevel(logging.INFO)
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()


class SendFailure:
    """Sends an exception of its block to the driver, except for those of a closed pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, EOFError | ConnectionError):
            return
        first_line = next(iter(str(error).splitlines()), "")
        with suppress(OSError):
            message = f"{type(error).__name__}: {first_line}"[:_MAX_ERROR_CHARS]
            self._pipe.send(ProcessFailure(message, time.time()))


def _end_with(pipe: int) -> None:
    """End this process soon after the driver, whatever it is doing."""
    driver = select.poll()
    driver.register(pipe, select.POLLRDHUP)
    driver.poll()
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)
