"""The driver's handle of a rank: a child process, or a process that a launcher started."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from agentrl.processes import Child, ProcessFailure

_RANK = "agentrl.trainer.launch.rank"


class Member(ABC):
    """inbox: messages received and not yet returned. num_pending: calls without their final reply.

    failure: the rank's own report of an error; is_closed: its end of the pipe is closed.
    """

    def __init__(self, pipe: Connection, pid: int) -> None:
        self.pipe = pipe
        self.pid = pid
        self.inbox: deque[object] = deque()
        self.num_pending = 0
        self.failure: ProcessFailure | None = None
        self.is_closed = False

    @property
    def where(self) -> str:
        """Its process, for an error message."""
        return f"process {self.pid}"

    def exit_reason(self) -> str:
        """How it ended, once it has closed the pipe or reported a failure."""
        return "has failed" if self.failure else "has gone"

    @property
    @abstractmethod
    def log(self) -> str:
        """Where its output is."""

    @abstractmethod
    def wait(self) -> None:
        """Wait a bounded time until it has ended by itself."""

    @abstractmethod
    def end(self) -> None:
        """Make it end; called from another thread than the one that receives its messages."""

    def kill(self) -> None:
        """Make it end, and close the pipe."""
        self.pipe.close()


class LaunchedRank(Member):
    """A rank that a launcher started, on some machine. It ends when the pipe is closed."""

    def __init__(self, pipe: Connection, pid: int, host: str) -> None:
        super().__init__(pipe, pid)
        self._host = host

    @property
    def where(self) -> str:
        """Its process and its machine."""
        return f"process {self.pid} on {self._host}"

    @property
    def log(self) -> str:
        """The launcher writes it."""
        return "its output"

    def wait(self) -> None:
        """Nothing: this process cannot observe when it has ended."""

    def end(self) -> None:
        """Shut its connection down."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)


class ChildRank(Member):
    """A child process. log: the file for its output; local_rank: its number among this machine's ranks.

    preloaded: the module with its worker.
    """

    def __init__(self, log: Path, local_rank: int, preloaded: str) -> None:
        self._log = log
        self._child = Child(_RANK, (str(local_rank), preloaded), log)
        super().__init__(self._child.pipe, self._child.pid)

    @property
    def log(self) -> str:
        """The file."""
        return str(self._log)

    def exit_reason(self) -> str:
        """How it ended; waits a bounded time until it has."""
        return self._child.exit_description() or super().exit_reason()

    def wait(self) -> None:
        """Wait until it has ended, for a bounded time."""
        self._child.wait()

    def end(self) -> None:
        """Kill it without waiting; its pipe closes when it has ended."""
        self._child.end()

    def kill(self) -> None:
        """Kill it; it has ended when this returns."""
        self._child.kill()
