"""The trainer's ranks as processes, on this machine or on those of a Ray cluster: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's reply. unblocked by: the
replies, or the end of any rank or of its machine, which ends the others. on shutdown: `close` has every rank
close its worker, and kills those that take too long. All ranks end with this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Concatenate, NoReturn, ParamSpec, TypeVar, cast
from weakref import ref

from agentrl.errors import AgentRLError, RemoteError, TrainerError
from agentrl.processes.children import Children
from agentrl.processes.gpus import check_gpus
from agentrl.processes.remote import PendingCall, Remote, Remotes, call_all, completed
from agentrl.runtime.stage import summary_of
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled_plan
from agentrl.trainer.launch.phases import Entered
from agentrl.trainer.launch.rank import BEGIN, IMPORT, RankProcess, RankReply, SentBucket, StreamEnd
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.rank_snapshot import RankSnapshot
from agentrl.trainer.launch.rendezvous import RankStore
from agentrl.trainer.launch.shared_buffers import AHEAD, Filled, received
from agentrl.types.seams import Bucket

_FAILURE_WAIT_S = 2.0
_CLOSE_S = 5.0

P = ParamSpec("P")
W = TypeVar("W")
R = TypeVar("R")


class Processes:
    """One process for each rank. folder: for their output, rank-0.log and so on.

    preloaded: the module with their worker, which they import at once; `begin` sends them the plan.
    places: where they are started; left out, on this machine, where they share the GPUs of this process out.

    Raises:
        ConfigError: this machine has GPUs, but not one for each rank.
    """

    def __init__(
        self, world_size: int, folder: Path, *, preloaded: str, places: Remotes | None = None
    ) -> None:
        if places is None and world_size > 1:
            check_gpus(world_size)
        places = places or Children()
        self._background = Background(self.end)
        self._course = RankCourse(world_size)
        self._failure: str | None = None
        self._store = RankStore(places.host)
        self._ranks: list[Remote[RankProcess]] = []
        # What earlier calls have left to read, with the number of the rank.
        self._unread: list[tuple[int, PendingCall[object]]] = []
        for number in range(world_size):
            log, told = folder.absolute() / f"rank-{number}.log", partial(self._on_message, number)
            place = RankPlace(number, places.number_here(number), self._store.rendezvous)
            near = places.is_here(number)
            rank, created = places.start(number, log, told, RankProcess, place, preloaded, is_near=near)
            self._ranks.append(rank)
            self._unread += [(number, created), (number, rank.call(RankProcess.imported))]
        self._course.begin(IMPORT)

    @property
    def pids(self) -> list[int]:
        """The processes on their machines, in the order of the ranks."""
        return [rank.pid for rank in self._ranks]

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
        self._course.wait()

    def begin(self, plan: RankPlan) -> None:
        """Send every rank a plan; the worker of the previous plan is closed.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """
        if plan.world_size != len(self._ranks):
            raise ValueError(f"the plan is for {plan.world_size} ranks, and there are {len(self._ranks)}")
        message = pickled_plan(plan)
        self._check()
        self._identify()
        self._course.begin(BEGIN)
        self._values(call_all(self._ranks, RankProcess.begin, message))

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of every rank's worker, by its name; the replies, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or has gone, now or before; the others have been ended.
            DiskError: on Ray: the object store of this machine is full, and so is its disk.
        """
        self._check()
        self._course.begin(method.__name__)
        values = self._values(call_all(self._ranks, RankProcess.call, method.__name__, args, kwargs))
        return [cast(R, value) for value in values]

    def stream(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Generator[Bucket, None, R]:
        """Buckets of rank 0, one at a time, while all other ranks run the method, too; exhaust it.

        At most two are on their way. The memory of a bucket is reused if nothing references the bucket when
        the next one is taken.

        Returns:
            what the method of rank 0 returned.

        Raises:
            TrainerError: a rank failed or has gone; the others have been ended.
        """
        self._check()
        name, (first, *others) = method.__name__, self._ranks
        self._course.begin(name)
        self._unread = [(0, first.call(RankProcess.begin_stream, name, args, kwargs))]
        self._unread += enumerate(call_all(others, RankProcess.call, name, args, kwargs), start=1)
        on_the_way = deque(first.call(RankProcess.next_bucket, None) for _ in range(AHEAD))
        try:
            while isinstance(sent := self._first_result(on_the_way), SentBucket):
                bucket = received(sent.tensors, sent.data)
                del sent
                data = ref(bucket.data)
                yield bucket
                del bucket
                # Another machine has its own copy.
                is_free = data() is None or not first.is_here
                on_the_way.append(first.call(RankProcess.next_bucket, is_free))
            return cast(R, self._course.receive(0, sent.reply))
        finally:
            # Where it was not exhausted, the other ranks still wait for rank 0.
            left = [*on_the_way, first.call(RankProcess.end_stream)]
            self._unread += [(0, call) for call in left]
            self._course.wait()

    def snapshot(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, int]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> RankSnapshot:
        """All buckets that `stream` would give, kept in the process of rank 0.

        Raises:
            TrainerError: a rank failed or has gone; the others have been ended.
        """
        self._check()
        name, (first, *others) = method.__name__, self._ranks
        self._course.begin(name)
        kept = first.call(RankProcess.keep_stream, name, args, kwargs)
        self._results(
            [(0, kept), *enumerate(call_all(others, RankProcess.call, name, args, kwargs), start=1)]
        )
        self._course.wait()
        facts = self._course.receive(0, kept.result())
        return RankSnapshot(
            first, facts, course=self._course, failure=lambda error: TrainerError(self._sentence(0, error))
        )

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that makes such calls in a thread (see `Background`)."""
        return await self._background.run(function, *args, **kwargs)

    def print_stacks(self) -> None:
        """Have every rank print the stacks of its threads into its log now, whatever it does."""
        for rank in self._ranks:
            rank.print_stacks()

    def close(self) -> None:
        """End all ranks."""
        if self._failure is None:
            closing = [rank.call(RankProcess.close) for rank in self._ranks]
            deadline = time.monotonic() + _CLOSE_S
            while closing and completed(closing, max(0.0, deadline - time.monotonic())):
                closing = [call for call in closing if not call.is_done]
        self._end_all()
        self._course.end()

    def end(self) -> None:
        """End all ranks at once; a thread that waits for their replies gets the error."""
        for rank in self._ranks:
            rank.end()

    def _end_all(self) -> None:
        """End all ranks, then complete their logs, which takes long where a machine is gone."""
        self.end()
        for rank in self._ranks:
            rank.close()

    def _on_message(self, number: int, message: object) -> None:
        if isinstance(message, Entered):
            self._course.enter(number, message.phase)

    def _check(self) -> None:
        """Read what earlier calls have left; raise where the ranks have ended.

        Raises:
            TrainerError: as for a call.
        """
        if self._failure is not None:
            raise TrainerError(self._failure)
        unread = self._unread
        for (number, _), result in zip(unread, self._results(unread), strict=True):
            if isinstance(result, RankReply):
                self._course.receive(number, result)

    def _identify(self) -> None:
        """Get to know every process while it is alive: its number, and where its log is."""
        for number, rank in enumerate(self._ranks):
            try:
                assert rank.pid
            except RemoteError as error:
                self._fail(number, error, {})

    def _values(self, calls: Sequence[PendingCall[RankReply[R]]]) -> list[R]:
        """What the calls of all ranks returned, with which their call ends."""
        replies = self._results([*enumerate(calls)])
        values = [self._course.receive(number, reply) for number, reply in enumerate(replies)]
        self._course.wait()
        return values

    def _results(self, calls: Sequence[tuple[int, PendingCall[R]]]) -> list[R]:
        """What the calls return. All are watched: any rank may fail, and the others then wait for it."""
        # Where the wait is interrupted, the next call reads them.
        self._unread = [*calls]
        waiting = {call: number for number, call in calls}
        while waiting:
            for call in completed(waiting):
                self._raise_failure(waiting.pop(call), call, waiting)
        self._unread = []
        return [call.result() for _, call in calls]

    def _first_result(self, on_the_way: deque[PendingCall[SentBucket | StreamEnd]]) -> SentBucket | StreamEnd:
        """The result of the first of rank 0's calls, while the calls of the other ranks are watched, too."""
        first = on_the_way[0]
        while not first.is_done:
            watched = {call: number for number, call in [(0, first), *self._unread]}
            for call in completed(watched):
                number = watched.pop(call)
                self._raise_failure(number, call, watched)
                self._unread = [(n, other) for n, other in self._unread if other is not call]
        self._raise_failure(0, first, {call: number for number, call in self._unread})
        return on_the_way.popleft().result()

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
        self._failure = self._sentence(culprit, errors[culprit])
        self._unread = []
        self._end_all()
        self._course.end()
        raise TrainerError(self._failure)

    def _sentence(self, number: int, error: RemoteError) -> str:
        rank = self._ranks[number]
        how = str(error) if error.is_gone else f"has failed: {error}"
        lines = " | ".join(rank.last_lines())
        ends = f", which ends: {lines}" if lines else ""
        return (
            f"rank {number} of the trainer ({rank.where}) {how}; the others were ended, too "
            f"(see {rank.log}{ends})."
        )


def _error_of(call: PendingCall[object]) -> RemoteError | None:
    """Why a call that has ended did not return."""
    try:
        call.result()
    except RemoteError as error:
        return error
    except AgentRLError as error:
        return RemoteError(summary_of(error), at_s=time.time())
    return None


class Background:
    """A thread for blocking calls, so that they do not block the event loop.

    It runs one call at a time, in the order in which they are made.

    A call that has begun runs to its end. A caller that is cancelled meanwhile still gets the result, and is
    cancelled at its next await: the result of a step is never lost. A caller that is cancelled a second time
    calls `abandon`, which has to make the call end, and waits no longer.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon = abandon
        self._thread = ThreadPoolExecutor(1, "agentrl-ranks")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in the thread; returns its result, or raises its exception."""
        # The call belongs to the run of its caller.
        bound = partial(function, *args, **kwargs)
        call = asyncio.wrap_future(self._thread.submit(copy_context().run, bound))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise
        await self._wait_until_done(call)
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        task.uncancel()
        task.cancel()
        return call.result()

    async def _wait_until_done(self, call: asyncio.Future[R]) -> None:
        is_done = False
        try:
            await asyncio.wait([call])
            is_done = True
        finally:
            if not is_done:
                self._abandon()
                # No caller reads the result; asyncio would log an exception that nothing retrieves.
                call.add_done_callback(lambda done: done.cancelled() or done.exception())
