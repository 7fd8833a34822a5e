"""The trainer's ranks as processes, on this machine or on those of a Ray cluster: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's reply. unblocked by: the
replies, or the end of any rank or of its machine, which ends the others. on shutdown: `close` has every rank
close its worker, and kills those that take too long. All ranks end with this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast
from weakref import ref

from agentrl.processes.children import Children
from agentrl.processes.gpus import check_gpus
from agentrl.processes.remote import Remotes, call_all, completed
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled_plan
from agentrl.trainer.launch.phases import Entered
from agentrl.trainer.launch.rank import BEGIN, IMPORT, RankProcess, SentBucket
from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.rank_snapshot import RankSnapshot
from agentrl.trainer.launch.rendezvous import RankStore
from agentrl.trainer.launch.shared_buffers import AHEAD, Filled, received
from agentrl.trainer.launch.watched_ranks import WatchedRanks
from agentrl.types.seams import Bucket

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
        self._watched = WatchedRanks(self._course)
        self._store = RankStore(places.host)
        self._ranks = self._watched.ranks
        for number in range(world_size):
            log, told = folder.absolute() / f"rank-{number}.log", partial(self._on_message, number)
            place = RankPlace(number, places.number_here(number), self._store.rendezvous)
            near = places.is_here(number)
            rank, created = places.start(number, log, told, RankProcess, place, preloaded, is_near=near)
            self._ranks.append(rank)
            self._watched.unread += [(number, created), (number, rank.call(RankProcess.imported))]
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
        self._watched.check()
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
        self._watched.check()
        self._watched.identify()
        self._course.begin(BEGIN)
        self._watched.values(call_all(self._ranks, RankProcess.begin, message))

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of every rank's worker, by its name; the replies, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or has gone, now or before; the others have been ended.
            DiskError: on Ray: the object store of this machine is full, and so is its disk.
        """
        self._watched.check()
        self._course.begin(method.__name__)
        values = self._watched.values(call_all(self._ranks, RankProcess.call, method.__name__, args, kwargs))
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
        self._watched.check()
        name, (first, *others) = method.__name__, self._ranks
        self._course.begin(name)
        self._watched.unread = [(0, first.call(RankProcess.begin_stream, name, args, kwargs))]
        self._watched.unread += enumerate(call_all(others, RankProcess.call, name, args, kwargs), start=1)
        on_the_way = deque(first.call(RankProcess.next_bucket, None) for _ in range(AHEAD))
        try:
            while isinstance(sent := self._watched.first_result(on_the_way), SentBucket):
                bucket = self._received(sent)
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
            self._watched.unread += [(0, call) for call in left]
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
        self._watched.check()
        name, (first, *others) = method.__name__, self._ranks
        self._course.begin(name)
        kept = first.call(RankProcess.keep_stream, name, args, kwargs)
        self._watched.results(
            [(0, kept), *enumerate(call_all(others, RankProcess.call, name, args, kwargs), start=1)]
        )
        self._course.wait()
        facts = self._course.receive(0, kept.result())
        failure = partial(self._watched.error, 0)
        return RankSnapshot(first, facts, course=self._course, failure=failure)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function that makes such calls in a thread (see `Background`)."""
        return await self._background.run(function, *args, **kwargs)

    def print_stacks(self) -> None:
        """Have every rank print the stacks of its threads into its log now, whatever it does."""
        for rank in self._ranks:
            rank.print_stacks()

    def close(self) -> None:
        """End all ranks."""
        if self._watched.failure is None:
            closing = [rank.call(RankProcess.close) for rank in self._ranks]
            deadline = time.monotonic() + _CLOSE_S
            while closing and completed(closing, max(0.0, deadline - time.monotonic())):
                closing = [call for call in closing if not call.is_done]
        self._watched.end()
        self._course.end()

    def end(self) -> None:
        """End all ranks at once; a thread that waits for their replies gets the error."""
        for rank in self._ranks:
            rank.end()

    def _received(self, sent: SentBucket) -> Bucket:
        try:
            return received(sent.tensors, sent.data)
        except FileNotFoundError:
            # Rank 0 has gone since it sent this, and its memory with it: any further call says how.
            self._watched.results([(0, self._ranks[0].call(RankProcess.next_bucket, False))])
            raise

    def _on_message(self, number: int, message: object) -> None:
        if isinstance(message, Entered):
            self._course.enter(number, message.phase)


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
