"""One rank in the driver's own process: for tests, debuggers, scripts. The event loop waits for its calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TypeVar
from weakref import ref

from agentrl.protocols import Bucket
from agentrl.trainer.launch.shared_buffers import bucket_of
from agentrl.trainer.launch.work import RankPlace, Work

R = TypeVar("R")


class InlineRank:
    """The worker of a plan of one rank, called directly. worker: one that was made already."""

    def __init__(self, worker: object = None) -> None:
        self._worker = self._given = worker
        self._stack = ExitStack()

    @property
    def pids(self) -> list[int]:
        """This process."""
        return [os.getpid()]

    def begin(self, plan: Work) -> None:
        """Make the worker of a plan, unless one was given; the one before is gone."""
        if plan.world_size != 1:
            raise ValueError(f"one process cannot be {plan.world_size} ranks; start processes")
        if self._given is not None:
            return
        self.close()
        self._worker = self._stack.enter_context(plan.working(RankPlace(0, 0, None)))

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of the worker; a list of its one answer."""
        return [getattr(self._worker, method)(*args)]

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """The buckets that a method of the worker fills, and what it returned."""
        filling = getattr(self._worker, method)(*args)
        while True:
            try:
                filled = next(filling)
            except StopIteration as end:
                returned: object = end.value
                return returned
            bucket = bucket_of(filled)
            seen = ref(bucket.data)
            yield bucket
            del bucket
            if seen() is None:
                filled.pool.give_back(filled.buffer)

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Call it here and now."""
        return function(*args)

    def close(self) -> None:
        """Let go of the worker."""
        self._stack.close()
        self._worker = None
