"""One rank in the driver's own process, for tests, debuggers and scripts. Its calls block the event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Concatenate, ParamSpec, TypeVar
from weakref import ref

from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.shared_buffers import Filled, bucket_of
from agentrl.types.seams import Bucket
from agentrl.weights.snapshot import LocalSnapshot

P = ParamSpec("P")
W = TypeVar("W")
R = TypeVar("R")


class InlineRank:
    """The worker of a plan of one rank, called directly. worker: in place of the one that the plan builds."""

    def __init__(self, worker: object = None) -> None:
        self._worker = self._prebuilt = worker
        self._stack = ExitStack()

    @property
    def pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    @property
    def where(self) -> list[str]:
        """This process."""
        return [f"process {os.getpid()}, the run's own"]

    def imported(self) -> None:
        """Do nothing: the worker is imported where it is built."""

    def begin(self, plan: RankPlan) -> None:
        """Build the worker of a plan, unless the constructor received one; the previous one is closed."""
        if plan.world_size != 1:
            raise ValueError(f"one process cannot be {plan.world_size} ranks; start processes")
        if self._prebuilt is not None:
            return
        self.close()
        self._worker = self._stack.enter_context(plan.worker(RankPlace(0, 0, None)))

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of the worker, by its name; a list of its one reply."""
        return [getattr(self._worker, method.__name__)(*args, **kwargs)]

    def stream(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Generator[Bucket, None, R]:
        """The buckets that a method of the worker fills; returns what the method returned."""
        buckets = getattr(self._worker, method.__name__)(*args, **kwargs)
        while True:
            try:
                filled = next(buckets)
            except StopIteration as end:
                returned: R = end.value
                return returned
            bucket = bucket_of(filled)
            data = ref(bucket.data)
            yield bucket
            del bucket
            if data() is None:
                filled.pool.give_back(filled.buffer)

    def snapshot(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, int]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LocalSnapshot:
        """All buckets of the stream."""
        return LocalSnapshot.of_stream(self.stream(method, *args, **kwargs))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in this thread, at once."""
        return function(*args, **kwargs)

    def end(self) -> None:
        """Do nothing: its calls are made in the thread of their caller."""

    def close(self) -> None:
        """Close the worker."""
        self._stack.close()
        self._worker = None
