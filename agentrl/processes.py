"""Processes of our own, each with a private pipe to the process that started it, and an end with it.

A process is `python -m MODULE FD ARGUMENT ..`; FD is its end of the pipe. It ignores Ctrl-C, which is for the
driver, and ends within seconds of the driver, also where that was killed. What goes wrong in it is the last
thing that it sends.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_END_S = 5.0
_LAST_CALL_S = 4.0
_WHY_CHARS = 300


class Failed(NamedTuple):
    """The last message of a process. at_s: when it went wrong, in seconds since 1970."""

    why: str
    at_s: float


class Child:
    """A process that this one has started. log: for what it prints. It finds modules where this one does.

    pipe: this process's end.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self.pipe, theirs = Pipe()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        # The child alone holds its end: when it is gone, ours shows it.
        theirs.close()
        self.pid = self._process.pid

    def fate(self) -> str | None:
        """How it ended, once it has; it is given time to. None = it runs."""
        self.wait()
        code = self._process.poll()
        if code is None:
            return None
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def wait(self) -> None:
        """Until it has ended, but not longer than that may take."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def end(self) -> None:
        """It is gone soon, and its pipe shows it."""
        self._process.kill()

    def kill(self) -> None:
        """It is gone when this returns."""
        self.pipe.close()
        self._process.kill()
        self._process.wait()


def follow_driver(pipe: Connection) -> None:
    """Have this process ignore Ctrl-C, print its log, and end with the process that started it."""
    # Ctrl-C is for the driver, which ends its processes in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("agentrl").setLevel(logging.INFO)
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()


class LastMessage:
    """Sends the driver what escapes from its block, unless it is the driver that has gone."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, EOFError | ConnectionError):
            return
        first = next(iter(str(error).splitlines()), "")
        with suppress(OSError):
            self._pipe.send(Failed(f"{type(error).__name__}: {first}"[:_WHY_CHARS], time.time()))


def _end_with(pipe: int) -> None:
    """End this process soon after the driver, also where it is in the middle of something."""
    driver = select.poll()
    driver.register(pipe, select.POLLRDHUP)
    driver.poll()
    time.sleep(_LAST_CALL_S)
    os._exit(1)
