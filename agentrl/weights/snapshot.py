"""A version of the weights in the memory of this process, for sinks that send work to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from agentrl.types.seams import Bucket, TensorSpec, Work
from agentrl.weights.codec import non_finite, views

R = TypeVar("R")


class LocalSnapshot:
    """A snapshot in this process; see `Snapshot`. Its buckets are referenced, not copied: do not change them.

    content: the buckets. The others: see `Snapshot`.
    """

    is_here = True
    device = None

    def __init__(self, buckets: Sequence[Bucket], checksum: int, not_finite: str | None = None) -> None:
        self.content: Sequence[Bucket] = tuple(buckets)
        self.checksum = checksum
        self.not_finite = not_finite
        self.process = f"process {os.getpid()}"

    @classmethod
    def of_stream(cls, stream: Generator[Bucket, None, int]) -> LocalSnapshot:
        """All buckets of a stream that returns their checksum."""
        buckets: list[Bucket] = []
        checks: list[Future[str | None]] = []
        # Meanwhile the next bucket is filled.
        with ThreadPoolExecutor(1) as thread:
            while True:
                try:
                    buckets.append(next(stream))
                except StopIteration as end:
                    names = [check.result() for check in checks]
                    checksum: int = end.value
                    return cls(buckets, checksum, next(filter(None, names), None))
                checks.append(thread.submit(non_finite, views(buckets[-1])))

    @property
    def parts(self) -> Sequence[Sequence[TensorSpec]]:
        """The tensors of each bucket."""
        return parts_of(self.content)

    async def run(self, work: Work[R]) -> R:
        """Call `work` with the buckets, in a thread."""
        return await asyncio.to_thread(work, self.content)

    async def on_host(self) -> LocalSnapshot:
        """Itself."""
        return self

    async def buckets(self) -> Sequence[Bucket]:
        """The buckets."""
        return self.content

    def free(self) -> None:
        """Drop the buckets."""
        self.content = ()


def parts_of(buckets: Sequence[Bucket]) -> tuple[tuple[TensorSpec, ...], ...]:
    """The tensors of each bucket."""
    return tuple(bucket.tensors for bucket in buckets)
