"""The processes of a trainer's ranks while calls of them run: all of them, or none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeVar

from agentrl.errors import AgentRLError, RemoteError, TrainerError
from agentrl.processes.remote import PendingCall, Remote, completed
from agentrl.runtime.stage import summary_of
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.rank import RankProcess, RankReply, SentBucket, StreamEnd

_FAILURE_WAIT_S = 2.0

R = TypeVar("R")


class WatchedRanks:
    """The calls of some ranks, all of which are watched: any rank may fail, and then all end.

    unread: what earlier calls have left to read, with the number of the rank. failure: why the ranks have
    ended.
    """

    def __init__(self, course: RankCourse) -> None:
        self.ranks: list[Remote[RankProcess]] = []
        self.unread: list[tuple[int, PendingCall[object]]] = []
        self.failure: str | None = None
        self._course = course

    def check(self) -> None:
        """Read what earlier calls have left; raise where the ranks have ended.

        Raises:
            TrainerError: as for a call.
        """
        if self.failure is not None:
            raise TrainerError(self.failure)
        unread = self.unread
        for (number, _), result in zip(unread, self.results(unread), strict=True):
            if isinstance(result, RankReply):
                self._course.receive(number, result)

    def identify(self) -> None:
        """Get to know every process while it is alive: its number, and where its log is."""
        for number, rank in enumerate(self.ranks):
            try:
                assert rank.pid
            except RemoteError as error:
                self._fail(number, error, {})

    def values(self, calls: Sequence[PendingCall[RankReply[R]]]) -> list[R]:
        """What the calls of all ranks returned, with which their call ends."""
        replies = self.results([*enumerate(calls)])
        values = [self._course.receive(number, reply) for number, reply in enumerate(replies)]
        self._course.wait()
        return values

    def results(self, calls: Sequence[tuple[int, PendingCall[R]]]) -> list[R]:
        """What the calls return. All are watched: any rank may fail, and the others then wait for it."""
        # Where the wait is interrupted, the next call reads them.
        self.unread = [*calls]
        waiting = {call: number for number, call in calls}
        while waiting:
            for call in completed(waiting):
                self._raise_failure(waiting.pop(call), call, waiting)
        self.unread = []
        return [call.result() for _, call in calls]

    def first_result(self, on_the_way: deque[PendingCall[SentBucket | StreamEnd]]) -> SentBucket | StreamEnd:
        """The result of the first of rank 0's calls, while the calls of the other ranks are watched, too."""
        first = on_the_way[0]
        while not first.is_done:
            watched = {call: number for number, call in [(0, first), *self.unread]}
            for call in completed(watched):
                number = watched.pop(call)
                self._raise_failure(number, call, watched)
                self.unread = [(n, other) for n, other in self.unread if other is not call]
        self._raise_failure(0, first, {call: number for number, call in self.unread})
        return on_the_way.popleft().result()

    def end(self) -> None:
        """End all ranks, then complete their logs, which takes long where a machine is gone."""
        for rank in self.ranks:
            rank.end()
        for rank in self.ranks:
            rank.close()

    def error(self, number: int, error: RemoteError) -> TrainerError:
        """How a rank ended, where its log is, and how that ends."""
        rank = self.ranks[number]
        how = str(error) if error.is_gone else f"has failed: {error}"
        lines = " | ".join(rank.last_lines())
        ends = f", which ends: {lines}" if lines else ""
        return TrainerError(
            f"rank {number} of the trainer ({rank.where}) {how}; the others were ended, too "
            f"(see {rank.log}{ends})."
        )

    def _raise_failure(self, number: int, call: PendingCall[R], others: Mapping[PendingCall[R], int]) -> None:
        if (error := _error_of(call)) is not None:
            self._fail(number, error, others)

    def _fail(self, number: int, error: RemoteError, others: Mapping[PendingCall[R], int]) -> NoReturn:
        """End all ranks, and name the first that failed. others: calls that are pending, of which ranks."""
        errors = {number: error}
        waiting, deadline = dict(others), time.monotonic() + _FAILURE_WAIT_S
        # A rank may have failed only because it waited for one that was killed, which reports nothing.
        while waiting and not any(error.is_gone for error in errors.values()):
            done = completed(waiting, max(0.0, deadline - time.monotonic()))
            if not done:
                break
            for call in done:
                number = waiting.pop(call)
                if (later := _error_of(call)) is not None:
                    errors.setdefault(number, later)
        culprit = min(errors, key=lambda rank: (not errors[rank].is_gone, errors[rank].at_s))
        failure = self.error(culprit, errors[culprit])
        self.failure = str(failure)
        self.unread = []
        self.end()
        self._course.end()
        raise failure


def _error_of(call: PendingCall[object]) -> RemoteError | None:
    """Why a call that has ended did not return."""
    try:
        call.result()
    except RemoteError as error:
        return error
    except AgentRLError as error:
        return RemoteError(summary_of(error), at_s=time.time())
    return None
