"""The interface of a transport of weights from the process that has them to servers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, TypeVar

from agentrl.engine.sglang.control import Server
from agentrl.types.seams import Snapshot, TensorSpec
from agentrl.weights.snapshot import LocalSnapshot

T = TypeVar("T")


async def results_of(calls: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Await every call to its end; then return the results in order, or raise the first error.

    A call to one server must not be abandoned because another server failed: it would still be under way when
    the weights are rolled back.
    """
    results: list[T] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


class Delivery(NamedTuple):
    """All weights of one version."""

    version: int
    snapshot: Snapshot

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """All tensors, in order."""
        return tuple(spec for part in self.snapshot.parts for spec in part)

    @property
    def checksum(self) -> int:
        """The trainer's, as `agentrl.weights.checksum` computes it."""
        return self.snapshot.checksum

    @property
    def salt(self) -> str:
        """The salt of prefixes that were computed with these weights.

        The version alone would not do: where another run uses the servers, its versions begin at 0 again.
        """
        return f"{self.version}.{self.checksum:016x}"


async def on_this_machine(snapshot: Snapshot) -> Snapshot:
    """The snapshot, or a copy of it in this process, where its process is on another machine."""
    return snapshot if snapshot.is_here else LocalSnapshot(await snapshot.buckets(), snapshot.checksum)


class Loaded(NamedTuple):
    """The weights of a server after a delivery.

    checksum: of the tensors read back from the server's memory; None = the server only confirmed the update.
    unread: tensors that were not read back, and count as they were received (count).
    """

    checksum: int | None
    unread: int = 0


class Transport(Protocol):
    """Sends weights to paused servers. It sets no versions and resumes no server.

    Raises, from every call:
        EngineUnavailableError: a server is not reachable, dropped the connection, or took too long.
        EngineError: a server refused, or does not support this transport.
        TrainerError: the process with the snapshot has gone.
    """

    @property
    def takes_device_memory(self) -> bool:
        """Whether it takes weights in the memory of a device."""

    async def open(self, servers: Sequence[Server], snapshot: Snapshot) -> None:
        """Prepare the transport from the process of a snapshot to these servers, while they still serve."""

    def staged(self, servers: Sequence[Server], delivery: Delivery) -> AbstractAsyncContextManager[None]:
        """Before the block, prepare all of a delivery that needs no pause; `send` in it does the rest."""

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        """Load all weights of a delivery, staged or not, into all of these servers."""

    async def close(self) -> None:
        """Remove every file and process group."""
