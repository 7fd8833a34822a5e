"""The driver's handle of a rank that is a child process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from agentrl.processes.child import Child, ProcessFailure
from agentrl.processes.gpus import variables_of

_RANK = "agentrl.trainer.launch.rank"


class ChildRank:
    """A rank. log: the file for its output; number: of the rank; preloaded: the module with its worker.

    gpus: its own, as in CUDA_VISIBLE_DEVICES; none: it sees those of this process.
    inbox: messages received and not yet returned. num_pending: calls without their final reply. failure: the
    rank's own report of an error; is_closed: its end of the pipe is closed.
    """

    def __init__(self, log: Path, number: int, preloaded: str, gpus: Sequence[str] = ()) -> None:
        self.log = log
        self._child = Child(_RANK, (str(number), preloaded), log, variables_of(gpus))
        self.pipe, self.pid = self._child.pipe, self._child.pid
        self.inbox: deque[object] = deque()
        self.num_pending = 0
        self.failure: ProcessFailure | None = None
        self.is_closed = False

    @property
    def where(self) -> str:
        """Its process, for an error message."""
        return f"process {self.pid}"

    def exit_reason(self) -> str:
        """How it ended; waits a bounded time until it has."""
        return self._child.exit_description() or ("has failed" if self.failure else "has gone")

    def wait(self) -> None:
        """Wait until it has ended, for a bounded time."""
        self._child.wait()

    def end(self) -> None:
        """Kill it without waiting; its pipe closes when it has ended. Any thread may call this."""
        self._child.end()

    def kill(self) -> None:
        """Kill it; it has ended when this returns."""
        self._child.kill()
