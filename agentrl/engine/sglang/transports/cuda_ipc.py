"""Weights from card to card, for servers with a GPU on the trainer's machine: nothing visits the host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakSet

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Loaded, results_of
from agentrl.engine.sglang.transports.inside import SHARED, NoAccessError, ahead_of, call_loader
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError
from agentrl.types import JSON
from agentrl.types.seams import DeviceWeights, Snapshot
from agentrl.weights.codec import size_of


class CudaIpc:
    """Has the loader inside every server map the trainer's memory on its card, and copy it into the model.

    The handle of CUDA's IPC is made in the trainer's rank, and passes this process as text. Paused, each
    server maps the memory, copies, compares checksums and copy, and unmaps it. Weights in the host's memory,
    and servers that cannot map that of a card, are left to `SharedMemory`, which needs the same loader.

    folder: see `SharedMemory`.
    """

    def __init__(self, folder: Path = SHARED) -> None:
        self._folder = folder
        self._host = SharedMemory(folder)
        self._without_access: WeakSet[Server] = WeakSet()
        self._copied: tuple[Delivery, Delivery] | None = None

    @property
    def takes_device_memory(self) -> bool:
        """Whether no server was found that cannot map it."""
        return not self._without_access

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Check that every server has the loader.

        Raises:
            EngineError: a server does not have it.
        """
        await self._host.open(servers, snapshot)

    @asynccontextmanager
    async def staged(self, servers: Sequence[Server], delivery: Delivery) -> AsyncIterator[None]:
        """Copy the weights to the host's memory, if a server needs them there.

        Raises:
            EngineError: see `SharedMemory.staged`.
        """
        others = [server for server in servers if not self._can_map(server, delivery)]
        if not others:
            yield
            return
        async with self._host.staged(others, await self._on_host(delivery)):
            try:
                yield
            finally:
                self._copied = None

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Load all weights into all servers, and compare them there with those that were sent.

        Raises:
            EngineError: a server did not load them.
        """
        loaded: dict[Server, Loaded] = {}
        weights = delivery.snapshot.device
        if weights is not None:
            mapping = [server for server in servers if self._can_map(server, delivery)]
            results = await results_of(self._map(server, delivery, weights) for server in mapping)
            pairs = zip(mapping, results, strict=True)
            loaded = {server: result for server, result in pairs if result is not None}
        others = [server for server in servers if server not in loaded]
        return {**loaded, **(await self._send_copies(others, delivery) if others else {})}

    async def close(self) -> None:
        """Forget the servers; nothing is mapped between two updates."""
        await self._host.close()

    def _can_map(self, server: Server, delivery: Delivery) -> bool:
        return delivery.snapshot.device is not None and server not in self._without_access

    async def _map(self, server: Server, delivery: Delivery, weights: DeviceWeights) -> Loaded | None:
        """Have a server load the memory; None = it cannot map it, and gets copies from now on."""
        ranks = self._host.ranks_of(server)
        try:
            unread, *_ = await call_loader(
                server, ranks, request_of(weights, is_whole=ranks == 1), self._folder
            )
        except NoAccessError:
            self._without_access.add(server)
            return None
        return Loaded(delivery.checksum, len(unread) if ranks == 1 else len(delivery.manifest))

    async def _on_host(self, delivery: Delivery) -> Delivery:
        """The delivery in the host's memory: one object for `staged` and for `send` in it."""
        if self._copied is None or self._copied[0] is not delivery:
            snapshot = await delivery.snapshot.on_host()
            same = snapshot is delivery.snapshot
            self._copied = delivery, delivery if same else Delivery(delivery.version, snapshot)
        return self._copied[1]

    async def _send_copies(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        copied = await self._on_host(delivery)
        loaded = await self._host.send(servers, copied)
        for server, result in loaded.items():
            if result.checksum != copied.checksum:
                raise EngineError(f"{server.url} holds other weights than were sent; send them again.")
        # What was loaded are the weights of this checksum, which is that of their copy on the card.
        return {server: result._replace(checksum=delivery.checksum) for server, result in loaded.items()}


def request_of(weights: DeviceWeights, *, is_whole: bool) -> dict[str, JSON]:
    """The loader's request for weights on a card. is_whole: a server's rank has complete tensors."""
    parts: list[JSON] = []
    for part in weights.parts:
        tensors: list[JSON] = []
        end = part.start
        for spec in part.tensors:
            tensors.append([spec.name, list(spec.shape), spec.dtype, end])
            end += size_of(spec)
        parts.append([part.start, end, part.content_hash, tensors])
    return {
        "action": "load_device",
        "whole": is_whole,
        "memory": weights.handle._asdict(),
        "parts": parts,
        "ahead": ahead_of(spec for part in weights.parts for spec in part.tensors),
    }
