"""Delayed weights: the staleness of an asynchronous run, with an exact lag."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.types.seams import Bucket, TensorSpec, WeightSink


@dataclass(slots=True)
class _Version:
    """The weights of one version, complete once they have a checksum."""

    manifest: Sequence[TensorSpec]
    number: int
    buckets: list[Bucket] = field(default_factory=list)
    checksum: int | None = None

    async def put(self, bucket: Bucket) -> None:
        """Buffer a bucket."""
        self.buckets.append(bucket)

    async def commit(self, checksum: int) -> None:
        """Complete the version."""
        self.checksum = checksum


class DelayedSink:
    """Forwards every version unchanged after `lag` newer ones have been received.

    The served weights are thus those of `lag` updates ago (in the beginning, the first ones).
    """

    def __init__(self, sink: WeightSink, lag: int) -> None:
        self._sink = sink
        self._lag = lag
        self._delayed: deque[_Version] = deque()

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[_Version]:
        """Start sending `version`.

        Raises:
            EngineError: the version that is forwarded now was not loaded.
        """
        received = _Version(manifest, version)
        yield received
        if received.checksum is None:
            return
        self._delayed.append(received)
        if len(self._delayed) > self._lag:
            await self._forward(self._delayed.popleft())

    async def _forward(self, weights: _Version) -> None:
        async with self._sink.begin(weights.manifest, weights.number) as transaction:
            for bucket in weights.buckets:
                await transaction.put(bucket)
            await transaction.commit(weights.checksum or 0)
