"""Weights that arrive late: what an asynchronous run does to an algorithm, made exact."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agentrl.protocols import Bucket, TensorSpec, WeightSink


@dataclass(slots=True)
class _Version:
    """Weights on their way, whole once a checksum came with them."""

    manifest: Sequence[TensorSpec]
    number: int
    buckets: list[Bucket] = field(default_factory=list)
    checksum: int | None = None

    async def put(self, bucket: Bucket) -> None:
        """Keep some tensors."""
        self.buckets.append(bucket)

    async def commit(self, checksum: int) -> None:
        """Nothing more comes."""
        self.checksum = checksum


class LateSink:
    """Passes every version on, whole and under its own number, when `lag` newer ones have come.

    So the weights that serve are always those of `lag` updates ago (in the beginning, the first ones).
    """

    def __init__(self, sink: WeightSink, lag: int) -> None:
        self._sink = sink
        self._lag = lag
        self._waiting: deque[_Version] = deque()

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[_Version]:
        """Start sending `version`.

        Raises:
            EngineError: the version that is due now did not arrive.
        """
        coming = _Version(manifest, version)
        yield coming
        if coming.checksum is None:
            return
        self._waiting.append(coming)
        if len(self._waiting) > self._lag:
            await self._pass_on(self._waiting.popleft())

    async def _pass_on(self, due: _Version) -> None:
        async with self._sink.begin(due.manifest, due.number) as transaction:
            for bucket in due.buckets:
                await transaction.put(bucket)
            await transaction.commit(due.checksum or 0)
