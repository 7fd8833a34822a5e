"""The trainer's ranks in processes that Ray started, on any machines of its cluster: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's reply. unblocked by: the
replies, or the end of any rank or of its machine, which ends the others. on shutdown: `close` has every rank
close its worker, and kills those that take too long. All ranks end with this process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from agentrl.errors import ClusterError, TrainerError
from agentrl.processes.placement import Allocation
from agentrl.processes.ray.actors import PendingCall, RemoteObject, completed, emptied, put
from agentrl.processes.ray.placement import RayPlacement
from agentrl.processes.ray.session import RaySession
from agentrl.trainer.launch.background import Background
from agentrl.trainer.launch.calls import BEGIN
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled_plan
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.rank_snapshot import RankSnapshot, SnapshotFacts
from agentrl.trainer.launch.remote_rank import SentBucket, StreamEnd
from agentrl.trainer.launch.rendezvous import LOOPBACK, RankStore
from agentrl.trainer.launch.shared_buffers import AHEAD
from agentrl.types.seams import Bucket

_RANK = "agentrl.trainer.launch.remote_rank:RemoteRank"
_FAILURE_WAIT_S = 2.0
_CLOSE_S = 5.0

R = TypeVar("R")


class RayRanks:
    """One process for each of the first `world_size` allocations of the ranks in a placement.

    folder: for their output, rank-0.log and so on. preloaded: the module with their worker, which they import
    at once; `begin` sends them the plan.

    Raises (from all calls):
        DiskError: the object store of this machine is full, and so is its disk.
    """

    def __init__(
        self, session: RaySession, placement: RayPlacement, world_size: int, folder: Path, *, preloaded: str
    ) -> None:
        allocations = placement.ranks[:world_size]
        assert len(allocations) == world_size, "the placement has an allocation for each rank"
        self._session = session
        self._background = Background(self.end)
        self._course = RankCourse(world_size)
        self._failure: str | None = None
        self._unread: list[PendingCall] = []
        is_near = all(allocation.node == session.node for allocation in allocations)
        self._store = RankStore(LOOPBACK if is_near else session.host)
        self._ranks = [
            RemoteObject(session, placement.group, allocation, emptied(folder / f"rank-{number}.log"))
            for number, allocation in enumerate(allocations)
        ]
        for number, rank in enumerate(self._ranks):
            place = RankPlace(number, _local_rank(allocations, number), self._store.rendezvous)
            self._unread.append(rank.create(_RANK, place, preloaded))

    @property
    def pids(self) -> list[int]:
        """The processes on their machines, in the order of the ranks."""
        return [rank.identify().pid for rank in self._ranks]

    @property
    def where(self) -> list[str]:
        """Their processes, in the order of the ranks."""
        return [rank.where for rank in self._ranks]

    def imported(self) -> None:
        """Wait until every rank has imported its worker; nothing is on a GPU yet.

        Raises:
            TrainerError: a rank failed, or has gone; the others have been ended.
        """
        self._check()

    def begin(self, plan: RankPlan) -> None:
        """Send every rank a plan; the worker of the previous plan is closed.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """
        if plan.world_size != len(self._ranks):
            raise ValueError(f"the plan is for {plan.world_size} ranks, and there are {len(self._ranks)}")
        message = put(pickled_plan(plan))
        self._check()
        self._identify()
        self._course.begin(BEGIN)
        self._results([rank.call_shared("begin", message) for rank in self._ranks])
        self._course.wait()

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's `Worker`; the replies, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or has gone, now or before; the others have been ended.
        """
        self._check()
        message = put(method, *args)
        self._course.begin(method)
        results = self._results([rank.call_shared("call", message) for rank in self._ranks])
        self._course.wait()
        return results

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """Buckets of rank 0, one at a time, while all other ranks run the method, too; exhaust it.

        At most two are on their way. The memory of a bucket is freed when nothing references it.

        Returns:
            what the method of rank 0 returned.

        Raises:
            TrainerError: a rank failed or has gone; the others have been ended.
        """
        self._check()
        message, (first, *others) = put(method, *args), self._ranks
        self._course.begin(method)
        self._unread = [first.call_shared("begin_stream", message)]
        self._unread += [rank.call_shared("call", message) for rank in others]
        on_the_way: deque[PendingCall] = deque(first.call("next_bucket") for _ in range(AHEAD))
        try:
            while isinstance(sent := self._first_result(on_the_way), SentBucket):
                on_the_way.append(first.call("next_bucket"))
                bucket = Bucket(sent.tensors, sent.bytes_B)
                del sent
                yield bucket
                del bucket
            assert isinstance(sent, StreamEnd), sent
            return self._course.receive(0, sent.reply)
        finally:
            # Where it was not exhausted, the other ranks still wait for rank 0.
            self._unread += [*on_the_way, first.call("end_stream")]
            self._course.wait()

    def snapshot(self, method: str, *args: object) -> RankSnapshot:
        """All buckets that `stream` would give, kept in the process of rank 0.

        Raises:
            TrainerError: a rank failed or has gone; the others have been ended.
        """
        self._check()
        message, (first, *others) = put(method, *args), self._ranks
        self._course.begin(method)
        keeping = [first.call_shared("keep_stream", message)]
        keeping += [rank.call_shared("call", message) for rank in others]
        facts = cast(SnapshotFacts, self._results(keeping)[0])
        self._course.wait()
        return RankSnapshot(
            first,
            facts,
            is_here=first.allocation.node == self._session.node,
            course=self._course,
            failure=lambda error: TrainerError(self._sentence(first, error)),
        )

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Run a function that makes such calls in a thread (see `Background`)."""
        return await self._background.run(function, *args)

    def print_stacks(self) -> None:
        """Have every rank print the stacks of its threads into its log now, whatever it does."""
        for rank in self._ranks:
            rank.print_stacks()

    def close(self) -> None:
        """End all ranks."""
        if self._failure is None:
            closing = [rank.call("close") for rank in self._ranks]
            deadline = time.monotonic() + _CLOSE_S
            while closing and (done := completed(closing, max(0.0, deadline - time.monotonic()))):
                closing = [call for call in closing if call not in done]
        self._end_all()
        self._course.end()

    def _end_all(self) -> None:
        """End all ranks, then copy the rest of their logs, which takes long where a machine is gone."""
        self.end()
        for rank in self._ranks:
            rank.close()

    def end(self) -> None:
        """End all ranks at once; a thread that waits for their replies gets the error."""
        for rank in self._ranks:
            rank.end()

    def _check(self) -> None:
        """Read what earlier calls have left; raise where the ranks have ended.

        Raises:
            TrainerError: as for a call.
        """
        if self._failure is not None:
            raise TrainerError(self._failure)
        unread, self._unread = self._unread, []
        self._results(unread)

    def _identify(self) -> None:
        """Get to know every process while it is alive: its number, and where its log is."""
        for rank in self._ranks:
            try:
                rank.identify()
            except ClusterError as error:
                self._fail(rank, error, [])

    def _results(self, calls: Sequence[PendingCall]) -> list[object]:
        """What the calls return. All are watched: any rank may fail, and the others then wait for it."""
        results: dict[PendingCall, object] = {}
        while waiting := [call for call in calls if call not in results]:
            for call in completed(waiting):
                try:
                    results[call] = self._result(call)
                except ClusterError as error:
                    self._fail(call.of, error, [other for other in waiting if other is not call])
        return [results[call] for call in calls]

    def _first_result(self, on_the_way: deque[PendingCall]) -> object:
        """The result of the first of rank 0's calls, while the calls of the other ranks are watched, too."""
        while True:
            watched = [on_the_way[0], *self._unread]
            for call in completed(watched):
                try:
                    result = self._result(call)
                except ClusterError as error:
                    self._fail(call.of, error, [other for other in watched if other is not call])
                if call is on_the_way[0]:
                    on_the_way.popleft()
                    return result
                self._unread.remove(call)

    def _result(self, call: PendingCall) -> object:
        return self._course.receive(self._ranks.index(call.of), call.result())

    def _fail(self, rank: RemoteObject, error: ClusterError, others: Sequence[PendingCall]) -> NoReturn:
        """End all ranks, and name the first that failed. others: calls of other ranks that are pending."""
        errors = {rank: error}
        waiting, deadline = list(others), time.monotonic() + _FAILURE_WAIT_S
        # A rank may have failed only because it waited for one that was killed, which reports nothing.
        while waiting and not any(error.is_gone for error in errors.values()):
            done = completed(waiting, max(0.0, deadline - time.monotonic()))
            if not done:
                break
            for other in done:
                waiting.remove(other)
                try:
                    other.result()
                except ClusterError as later:
                    errors.setdefault(other.of, later)
        culprit = min(errors, key=lambda rank: (not errors[rank].is_gone, errors[rank].at_s))
        self._failure = self._sentence(culprit, errors[culprit])
        self._unread = []
        self._end_all()
        self._course.end()
        raise TrainerError(self._failure)

    def _sentence(self, rank: RemoteObject, error: ClusterError) -> str:
        how = str(error) if error.is_gone else f"has failed: {error}"
        lines = " | ".join(rank.last_lines())
        ends = f", which ends: {lines}" if lines else ""
        return (
            f"rank {self._ranks.index(rank)} of the trainer ({rank.where}) {how}; the others were ended, too "
            f"(see {rank.log}{ends})."
        )


def _local_rank(allocations: Sequence[Allocation], number: int) -> int:
    """The number of a rank among those of its machine; 0 for one that has GPUs, since it sees no others."""
    if allocations[number].devices:
        return 0
    return sum(allocation.node == allocations[number].node for allocation in allocations[:number])
