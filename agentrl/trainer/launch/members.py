"""A rank as the driver sees it: a process of its own, or one that a launcher started."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from agentrl.processes import Child, Failed

_RANK = "agentrl.trainer.launch.rank"


class Member(ABC):
    """inbox: what it has said and nobody has asked for yet. owes: calls that it has not answered to the end.

    word: what it said was wrong; gone: it is not at the other end of the pipe any more.
    """

    def __init__(self, pipe: Connection, pid: int) -> None:
        self.pipe = pipe
        self.pid = pid
        self.inbox: deque[object] = deque()
        self.owes = 0
        self.word: Failed | None = None
        self.gone = False

    @property
    def where(self) -> str:
        """Its process, as a person finds it."""
        return f"process {self.pid}"

    def fate(self) -> str:
        """What became of it, when it has gone or said that it will."""
        return "has failed" if self.word else "has gone"

    @property
    @abstractmethod
    def log(self) -> str:
        """Where to read on."""

    @abstractmethod
    def wait(self) -> None:
        """Give it time to end by itself."""

    @abstractmethod
    def end(self) -> None:
        """See to it that it ends, from another thread than the one that listens to it."""

    def kill(self) -> None:
        """See to it that it ends."""
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
        """The launcher has it."""
        return "its output"

    def wait(self) -> None:
        """Nobody here can know when it has ended."""

    def end(self) -> None:
        """Its connection breaks off."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)


class Own(Member):
    """A process on this machine. log: for what it prints; local: its number among this machine's ranks.

    preloaded: the module with its worker.
    """

    def __init__(self, log: Path, local: int, preloaded: str) -> None:
        self._log = log
        self._child = Child(_RANK, (str(local), preloaded), log)
        super().__init__(self._child.pipe, self._child.pid)

    @property
    def log(self) -> str:
        """The file."""
        return str(self._log)

    def fate(self) -> str:
        """How it ended; it is given time to."""
        return self._child.fate() or super().fate()

    def wait(self) -> None:
        """Until it has ended, but not longer than that may take."""
        self._child.wait()

    def end(self) -> None:
        """It is gone soon, and its pipe says so."""
        self._child.end()

    def kill(self) -> None:
        """It is gone when this returns."""
        self._child.kill()
