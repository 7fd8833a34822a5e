"""A sink, and servers on the loopback device that it feeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Delivery, Loaded, Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.protocols import Bucket
from agentrl.weights import checksum, manifest_of, pack_buckets
from tests.engine.scheduling import Scheduler, checkpoint

Named = list[tuple[str, torch.Tensor]]
TIMEOUT_S = 5.0


class Rig:
    """Servers, and a sink that feeds them. held: how often the policy was held; lost: servers reported."""

    def __init__(self, schedulers: Sequence[Scheduler], urls: Sequence[str], transport: Transport) -> None:
        self.schedulers = list(schedulers)
        self.servers = [Server(url, timeout_s=TIMEOUT_S, update_timeout_s=TIMEOUT_S) for url in urls]
        self.held = 0
        self.lost: list[Server] = []
        self.sink = SGLangSink(transport, lambda: self.servers, self._hold, self._lose)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        self.held += 1
        yield

    def _lose(self, server: Server, error: EngineError) -> None:
        assert str(error)
        self.lost.append(server)

    async def send(self, version: int, *, named: Named | None = None, damage: int = 0) -> None:
        named = checkpoint(version) if named is None else named
        async with self.sink.begin(manifest_of(named), version) as transaction:
            for bucket in pack_buckets(named, 100):
                await transaction.put(bucket)
            await transaction.commit(checksum(named) + damage)

    async def serve(self, version: int) -> None:
        """Check that every server serves exactly this version, and never served anything else by its name."""
        for scheduler, server in zip(self.schedulers, self.servers, strict=True):
            assert scheduler.holds(version)
            assert not scheduler.paused
            assert scheduler.dead is None
            assert await server.weight_version() == version
            assert all(name == str(seed) for name, seed in scheduler.served)


class Damaging(NamedTuple):
    """A transport on which one byte changes on the way, once it is armed; what is sent then is whole."""

    inner: Transport
    armed: list[bool]

    async def open(self, servers: Sequence[Server]) -> None:
        await self.inner.open(servers)

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        if self.armed and self.armed.pop():
            first, *others = delivery.buckets
            data = first.data.copy()
            data[-1] ^= 1
            delivery = delivery._replace(buckets=(Bucket(first.tensors, data), *others))
        return await self.inner.send(servers, delivery)

    async def close(self) -> None:
        await self.inner.close()


@asynccontextmanager
async def rig(folder: Path, *schedulers: Scheduler, transport: Transport | None = None) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(one.listening()) for one in schedulers]
        made = Rig(schedulers, urls, transport or SharedMemory(folder))
        async with asyncio.timeout(30):
            yield made
        await made.sink.close()
        for server in made.servers:
            await server.close()
        assert [path for path in folder.iterdir() if path.is_file()] == []


def holding(over: asyncio.Event, path: str) -> Callable[[str, dict], object]:
    """Keep the first call of a path waiting."""
    first = [over.wait]
    return lambda now, body: first.pop()() if now == path and first else None


def transports(folder: Path) -> dict[str, Transport]:
    (folder / "shared").mkdir(exist_ok=True)
    shared = folder / "shared"
    return {
        "shared memory": SharedMemory(shared),
        "disk": Disk(folder / "disk", shared=shared),
        "delta": Disk(folder / "disk", full_every=3, mirror=folder / "mirror", shared=shared),
        "distributed": Distributed(timeout_s=TIMEOUT_S, folder=shared),
    }
