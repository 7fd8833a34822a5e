"""A weight sink and its servers, on the loopback device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Delivery, Loaded, Transport
from agentrl.engine.sglang.transports.cuda_ipc import CudaIpc
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.types.seams import Bucket, Snapshot
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets
from agentrl.weights.snapshot import LocalSnapshot
from tests.engine import devices
from tests.engine.scheduling import Scheduler, checkpoint

NamedTensors = list[tuple[str, torch.Tensor]]
TIMEOUT_S = 5.0


class Rig:
    """Servers, and the sink that updates them. held: holds of the policy (count); lost: servers reported."""

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        urls: Sequence[str],
        transport: Transport,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.schedulers = list(schedulers)
        self.servers = [Server(url, headers, timeout_s=TIMEOUT_S, update_timeout_s=TIMEOUT_S) for url in urls]
        self.held = 0
        self.lost: list[Server] = []
        self.sink = SGLangSink(transport, lambda: self.servers, self._hold, self._report_lost)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[float]:
        self.held += 1
        yield time.perf_counter()

    def _report_lost(self, server: Server, error: EngineError) -> None:
        assert str(error)
        self.lost.append(server)

    async def send(self, version: int, *, tensors: NamedTensors | None = None, damage: int = 0) -> None:
        tensors = checkpoint(version) if tensors is None else tensors
        if self.sink.takes_device_memory:
            await self.sink.load(devices.PackedSnapshot(tensors), version)
            return
        async with self.sink.begin(manifest_of(tensors), version) as transaction:
            for bucket in pack_buckets(tensors, 100):
                await transaction.put(bucket)
            await transaction.commit(checksum(tensors) + damage)

    async def expect_version(self, version: int) -> None:
        """Check that every server serves exactly this version, and never served other weights under it."""
        for scheduler, server in zip(self.schedulers, self.servers, strict=True):
            assert scheduler.holds(version)
            assert not scheduler.paused
            assert scheduler.dead is None
            assert await server.weight_version() == version
            assert all(name == str(seed) for name, seed in scheduler.served)


@dataclass(eq=False)
class Damaging:
    """A transport that flips a byte of the next delivery once it is armed."""

    inner: Transport
    armed: list[bool]
    changed: Delivery | None = None

    @property
    def takes_device_memory(self) -> bool:
        return self.inner.takes_device_memory

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        await self.inner.open(servers, snapshot)

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        self.changed = None
        if self.armed and isinstance(delivery.snapshot, devices.PackedSnapshot):
            self.armed.pop()
            delivery.snapshot.damage()
        elif self.armed and self.armed.pop():
            first, *rest = await delivery.snapshot.buckets()
            data = first.data.copy()
            data[-1] ^= 1
            damaged = LocalSnapshot([Bucket(first.tensors, data), *rest], delivery.checksum)
            self.changed = Delivery(delivery.version, damaged)
        async with self.inner.staged(servers, self.changed or delivery):
            yield
        self.changed = None

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        sent, self.changed = self.changed or delivery, None
        return await self.inner.send(servers, sent)

    async def close(self) -> None:
        await self.inner.close()


@asynccontextmanager
async def open_rig(
    folder: Path, *schedulers: Scheduler, transport: Transport | None = None
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(scheduler.listening()) for scheduler in schedulers]
        rig = Rig(schedulers, urls, transport or SharedMemory(folder))
        async with asyncio.timeout(30):
            yield rig
        await rig.sink.close()
        for server in rig.servers:
            await server.close()
        assert [path for path in folder.iterdir() if path.is_file()] == []


def block_first(event: asyncio.Event, path: str) -> Callable[[str, dict], object]:
    """Block the first call of a path until the event."""
    first = [event.wait]
    return lambda called, body: first.pop()() if called == path and first else None


def transports(folder: Path) -> dict[str, Transport]:
    (folder / "shared").mkdir(exist_ok=True)
    shared = folder / "shared"
    return {
        "cuda ipc": CudaIpc(shared),
        "shared memory": SharedMemory(shared),
        "disk": Disk(folder / "disk", shared=shared),
        "delta": Disk(folder / "disk", full_every=3, mirror=folder / "mirror", shared=shared),
        "distributed": Distributed(timeout_s=TIMEOUT_S, folder=shared),
    }
