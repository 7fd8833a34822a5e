"""The weight sink of a fleet: an update is made again where a server crashes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from agentrl.engine.sglang.sink import SGLangSink
from agentrl.errors import EngineUnavailableError
from agentrl.types.seams import Snapshot, TensorSpec, WeightTransaction

_COMMIT_ATTEMPTS = 3


class FleetSink:
    """The sink of a fleet. Where a server crashes during an update, it gets the weights after its restart."""

    def __init__(self, sink: SGLangSink, can_serve: asyncio.Event) -> None:
        self._sink, self._can_serve = sink, can_serve

    @property
    def standstill_s(self) -> float:
        """See `SGLangSink`."""
        return self._sink.standstill_s

    @property
    def takes_device_memory(self) -> bool:
        """See `SGLangSink`."""
        return self._sink.takes_device_memory

    @property
    def takes_adapters(self) -> bool:
        """See `SGLangSink`."""
        return self._sink.takes_adapters

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[FleetTransaction]:
        """See `SGLangSink.begin`."""
        async with self._sink.begin(manifest, version) as transaction:
            yield FleetTransaction(transaction, self._until_done)

    async def load(self, snapshot: Snapshot, version: int) -> None:
        """See `SGLangSink.load`; waits until every role has a server in service.

        Raises:
            EngineUnavailableError: servers crashed in each of several attempts.
        """
        await self._until_done(partial(self._sink.load, snapshot, version))

    def holds(self, snapshot: Snapshot) -> bool:
        """See `SGLangSink.holds`."""
        return self._sink.holds(snapshot)

    async def _until_done(self, update: Callable[[], Awaitable[None]]) -> None:
        """Update all servers, again where one crashes meanwhile."""
        for attempts_left in reversed(range(_COMMIT_ATTEMPTS)):
            await self._can_serve.wait()
            try:
                await update()
            except EngineUnavailableError:
                if not attempts_left:
                    raise
            else:
                break


class FleetTransaction:
    """An update of all servers of a fleet to one version. until_done: makes several attempts of a call."""

    def __init__(
        self,
        transaction: WeightTransaction,
        until_done: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._transaction, self._until_done = transaction, until_done
        self.put = transaction.put

    async def commit(self, checksum: int) -> None:
        """See `Transaction.commit`; waits until every role has a server in service.

        Raises:
            EngineUnavailableError: servers crashed in each of several attempts.
        """
        await self._until_done(partial(self._transaction.commit, checksum))
