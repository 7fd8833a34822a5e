"""One rank in the driver's own process, for tests, debuggers and scripts. Its calls block the event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TypeVar
from weakref import ref

from agentrl.trainer.launch.rank_plan import RankPlace, RankPlan
from agentrl.trainer.launch.shared_buffers import bucket_of
from agentrl.types.seams import Bucket
from agentrl.weights.snapshot import LocalSnapshot

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

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of the worker; a list of its one reply."""
        return [getattr(self._worker, method)(*args)]

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """The buckets that a method of the worker fills; returns what the method returned."""
        buckets = getattr(self._worker, method)(*args)
        while True:
            try:
                filled = next(buckets)
            except StopIteration as end:
                returned: object = end.value
                return returned
            bucket = bucket_of(filled)
            data = ref(bucket.data)
            yield bucket
            del bucket
            if data() is None:
                filled.pool.give_back(filled.buffer)

    def snapshot(self, method: str, *args: object) -> LocalSnapshot:
        """All buckets of the stream."""
        return LocalSnapshot.of_stream(self.stream(method, *args))

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Call it in this thread, at once."""
        return function(*args)

    def end(self) -> None:
        """Do nothing: its calls are made in the thread of their caller."""

    def close(self) -> None:
        """Close the worker."""
        self._stack.close()
        self._worker = None
