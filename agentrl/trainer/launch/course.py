"""What the ranks of a trainer do, for the status and the timeline of the run that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final, TypeVar

from agentrl.records.clock import PeerClock
from agentrl.runtime.activity import ENDED, PROCESS, Doing, Span, current_activities
from agentrl.trainer.launch.rank import BEGIN, IMPORT, RankReply

R = TypeVar("R")

_TITLES: Final = {
    IMPORT: "importing",
    BEGIN: "build",
    "weights": "gather",
    "weights_on_device": "gather",
    "copied_weights": "copy weights",
}
"""Names of calls, where those of the methods say too little."""
_SHORTEST_S: Final = 1e-3
_FOR_A_CALL, _FOR_OTHERS = "a call", "the other ranks"
_MAIN: Final = 1
"""The lane of the calls of all ranks, which follow each other."""


class RankCourse:
    """Records the calls of ranks in the run in whose context they are made; elsewhere nothing.

    A call of less than a millisecond leaves no span: the driver polls with such.
    """

    def __init__(self, number: int) -> None:
        self._clocks = [PeerClock() for _ in range(number)]
        self._processes: dict[str, Doing] | None = None

    def begin(self, method: str) -> None:
        """All ranks begin a call."""
        activities = current_activities()
        self._processes = None if activities is None else activities.processes
        self._all_enter(_TITLES.get(method, method))

    def enter(self, rank: int, phase: str) -> None:
        """A rank enters a phase of its call; from any thread."""
        self._enter(rank, phase, "")

    def receive(self, rank: int, reply: RankReply[R]) -> R:
        """What a call of a rank returned, which ends that."""
        self._add(rank, reply, _MAIN)
        self._enter(rank, "", _FOR_OTHERS)
        return reply.value

    def wait(self) -> None:
        """All ranks have returned, and wait for the next call."""
        self._all_enter("", _FOR_A_CALL)

    def end(self) -> None:
        """The ranks have ended."""
        self._all_enter(ENDED)

    @contextmanager
    def concurrent(self, rank: int) -> Iterator[Callable[[RankReply[R]], R]]:
        """The block of work beside the calls of a rank; yields what takes its reply, and returns the value.

        Such work may overlap.
        """
        activities = current_activities()
        lanes = None if activities is None else activities.lanes(f"beside the calls of rank {rank}")
        lane = 0 if lanes is None else lanes.take()

        def receive(reply: RankReply[R]) -> R:
            self._add(rank, reply, _MAIN + lane)
            return reply.value

        try:
            yield receive
        finally:
            if lanes is not None:
                lanes.free(lane)

    def _add(self, rank: int, reply: RankReply[R], lane: int) -> None:
        offset_s = self._clocks[rank].offset_s(reply.ended)
        start_s, end_s, process = reply.began_s + offset_s, reply.ended.time_s + offset_s, f"rank {rank}"
        if (activities := current_activities()) is not None and end_s - start_s >= _SHORTEST_S:
            name = _TITLES.get(reply.method, reply.method)
            activities.spans.append(Span(name, "", process, PROCESS, lane, start_s, end_s, process))

    def _all_enter(self, name: str, what: str = "") -> None:
        for rank in range(len(self._clocks)):
            self._enter(rank, name, what)

    def _enter(self, rank: int, name: str, what: str) -> None:
        # The span is the rank's own, by its clock.
        if self._processes is not None:
            self._processes[f"rank {rank}"] = Doing(name, what, perf_counter())
