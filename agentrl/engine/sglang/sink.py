"""The weight sink of SGLang servers: an update reaches all of them or none, and no server mixes versions.

begin -> put ... -> commit: compare the checksum of what has arrived here with the trainer's, then `load` it
load -> stage   all that the transport can prepare while the servers serve
        hold    the policy stops sending, and ends running requests
        pause   every server, in abort mode
        send    by the transport; compare the checksum of the loaded weights with the trainer's
        set the version, resume; the policy's requests have another salt from then on

No prefix that older weights computed is used afterwards, because requests are salted with the weights
(`salt`), and the server evicts such prefixes as its cache needs room. A flush is no part of an update: it
takes SGLang longer than all the rest of a small one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import TypeAlias

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Transport, results_of
from agentrl.engine.sglang.transports.lora import LoraAdapters
from agentrl.errors import EngineError, EngineUnavailableError, TrainerError
from agentrl.types.seams import Bucket, Snapshot, TensorSpec
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import size_of
from agentrl.weights.snapshot import LocalSnapshot
from agentrl.weights.staging import Transaction

Servers: TypeAlias = Callable[[], Sequence[Server]]
"""The servers in service now."""
Hold: TypeAlias = Callable[[], AbstractAsyncContextManager[float]]
"""During the block the policy sends no request, and none of its requests runs. Yields when the first one had
ended (`time.perf_counter`)."""
Lost: TypeAlias = Callable[[Server, EngineError], None]
"""Called with a server that may not serve one complete version: it has to be restarted."""

_HEALTH_TIMEOUT_S = 30.0
_LONGEST_VERSION = 9


class SGLangSink:
    """Sends every version to all servers, and keeps the snapshot of the last one for servers that restart.

    A server in service always serves one complete version. Where an update fails, the servers get the
    previous version again; a server where that fails, or without a previous version, stays paused and is
    reported to `lost`.

    One update or restore runs at a time; the next waits for it. A cancellation takes effect after it has
    ended.

    standstill_s: how long servers sampled nothing in the last update: from the end of the first request that
        it interrupted until requests are sent again (seconds).
    num_updates: versions that all servers have loaded (count).
    """

    def __init__(self, transport: Transport, servers: Servers, hold: Hold, lost: Lost) -> None:
        self._transport = transport
        self._servers = servers
        self._hold = hold
        self._lost = lost
        self._current: Delivery | None = None
        self.num_updates = 0
        self._updating = asyncio.Lock()
        self.standstill_s = 0.0

    @property
    def takes_device_memory(self) -> bool:
        """Whether the transport does."""
        return self._transport.takes_device_memory

    @property
    def takes_adapters(self) -> bool:
        """Whether a version is adapters alone."""
        return isinstance(self._transport, LoraAdapters)

    @property
    def version(self) -> int:
        """The version that was last sent to all servers; 0 before the first."""
        return 0 if self._current is None else self._current.version

    @property
    def salt(self) -> str | None:
        """The salt of requests to the servers; None before the first version."""
        return None if self._current is None else self._current.salt

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[Transaction]:
        """Start sending `version`; `manifest` lists all its tensors.

        Raises:
            EngineError: a tensor is listed twice, has an unknown dtype, or differs from the previous version.
        """
        _check_version(version)
        _check_manifest(manifest, self._current)
        yield Transaction(manifest, version, _StagedBuckets(version, self._deliver))

    async def load(self, snapshot: Snapshot, version: int) -> None:
        """Serve a snapshot as `version`; the sink frees it after a later version.

        Raises:
            EngineError: a server did not load it, or it has other tensors than the previous version, which
                serves on.
            TrainerError: the process with the snapshot has gone; likewise.
        """
        _check_version(version)
        delivery = Delivery(version, snapshot)
        _check_manifest(delivery.manifest, self._current)
        await self._deliver(delivery)

    def holds(self, snapshot: Snapshot) -> bool:
        """Whether it serves this snapshot, also where the caller of `load` was cancelled."""
        return self._current is not None and self._current.snapshot is snapshot

    async def restore(self, server: Server) -> None:
        """Send the current weights to a server that was just started; it may get requests afterwards.

        Raises:
            EngineError: it did not load them. It may hold mixed versions now, and stays paused: stop it.
        """
        await _uncancellable(self._restore(server))

    async def close(self) -> None:
        """Wait for a running update, then free the weights and the transport. The servers keep running."""
        async with self._updating:
            await self._transport.close()
            current, self._current = self._current, None
            if current is not None:
                current.snapshot.free()

    async def _restore(self, server: Server) -> None:
        async with self._updating:
            if self._current is None:
                return
            with _without_trainer(server):
                await self._transport.open([server], self._current.snapshot)
                await server.pause()
                await self._load([server], self._current)
            await server.resume()

    async def _deliver(self, delivery: Delivery) -> None:
        await _uncancellable(self._update(delivery))

    async def _update(self, delivery: Delivery) -> None:
        async with self._updating:
            servers = tuple(self._servers())
            if not servers:
                raise EngineUnavailableError("no server takes weights; start one, and send them again.")
            opened = False
            try:
                await self._transport.open(servers, delivery.snapshot)
                opened = True
            finally:
                if not opened:
                    await self._report_dead(servers)
            # Freeing these weights takes time, too: not before the servers are resumed.
            previous = self._current
            async with self._transport.staged(servers, delivery):
                async with self._hold() as still_since:
                    await self._swap(servers, delivery)
                self.standstill_s = time.perf_counter() - still_since
            if previous is not None:
                previous.snapshot.free()

    async def _swap(self, servers: Sequence[Server], delivery: Delivery) -> None:
        await self._pause(servers)
        complete = False
        # No failure, not even a bug of this module, may leave mixed versions in a server.
        try:
            await self._load(servers, delivery)
            complete = True
        finally:
            if not complete:
                for server in servers:
                    await self._report_failure(server, self._roll_back(server))
        self._current = delivery
        self.num_updates += 1
        # Their weights are complete now; resume still fails where a server has crashed.
        await asyncio.gather(*(self._report_failure(server, server.resume()) for server in servers))

    async def _pause(self, servers: Sequence[Server]) -> None:
        results = await asyncio.gather(*(server.pause() for server in servers), return_exceptions=True)
        failed = [result for result in results if result is not None]
        if not failed:
            return
        for server, result in zip(servers, results, strict=True):
            if result is None:
                await self._report_failure(server, server.resume())
            elif isinstance(result, EngineError):
                # The pause may still take effect later.
                self._lost(server, result)
        raise failed[0]

    async def _load(self, servers: Sequence[Server], delivery: Delivery) -> None:
        loaded = await self._transport.send(servers, delivery)
        for server in servers:
            loaded_checksum = loaded[server].checksum
            if loaded_checksum is not None and loaded_checksum != delivery.checksum:
                raise EngineError(
                    f"{server.url} holds other weights than version {delivery.version} has (checksum "
                    f"{loaded_checksum}, expected {delivery.checksum}); send them again."
                )
        await results_of(server.set_version(delivery.version) for server in servers)

    async def _roll_back(self, server: Server) -> None:
        """Send the previous version to a server that may hold some of the new weights."""
        if self._current is None:
            raise EngineError(f"{server.url} has no previous version to restore; restart it.")
        if server.in_doubt:
            raise EngineUnavailableError(f"{server.url} did not answer an update; restart it.")
        with _without_trainer(server):
            await self._transport.open([server], self._current.snapshot)
            await self._load([server], self._current)
        await server.resume()

    async def _report_failure(self, server: Server, call: Awaitable[None]) -> None:
        try:
            await call
        except EngineError as error:
            self._lost(server, error)

    async def _report_dead(self, servers: Sequence[Server]) -> None:
        healthy = await asyncio.gather(*(server.healthy(_HEALTH_TIMEOUT_S) for server in servers))
        for server in [server for server, is_healthy in zip(servers, healthy, strict=True) if not is_healthy]:
            self._lost(server, EngineUnavailableError(f"{server.url} is not reachable any more; restart it."))


class _StagedBuckets:
    """The buckets of one version. They are referenced, not copied: do not change them."""

    def __init__(self, version: int, deliver: Callable[[Delivery], Awaitable[None]]) -> None:
        self._version = version
        self._deliver = deliver
        self._buckets: list[Bucket] = []
        self._digests: list[int] = []

    async def add(self, bucket: Bucket) -> None:
        self._digests += await asyncio.to_thread(digests_of, bucket)
        self._buckets.append(bucket)

    async def checksum(self) -> int:
        return sum_digests(self._digests)

    async def install(self) -> None:
        """Stage, hold, pause, send, compare the checksum of the loaded weights, set the version, resume."""
        snapshot = LocalSnapshot(self._buckets, sum_digests(self._digests))
        await self._deliver(Delivery(self._version, snapshot))


@contextmanager
def _without_trainer(server: Server) -> Iterator[None]:
    """A server does not get the weights that the others have where the trainer that has them has gone."""
    try:
        yield
    except TrainerError as error:
        raise EngineUnavailableError(f"{server.url} cannot get its weights: {error}") from error


def _check_version(version: int) -> None:
    if not 0 <= version < 10**_LONGEST_VERSION:
        raise EngineError(f"a version is a number of at most {_LONGEST_VERSION} digits, not {version}.")


def _check_manifest(manifest: Sequence[TensorSpec], current: Delivery | None) -> None:
    names = [spec.name for spec in manifest]
    if not names or len(set(names)) < len(names):
        raise EngineError("a manifest lists every tensor once, and at least one; build it anew.")
    try:
        empty = [spec.name for spec in manifest if size_of(spec) < 0]
    except ValueError as error:
        raise EngineError(f"the manifest is invalid: {error}; build it anew.") from error
    previous = set(manifest if current is None else current.manifest)
    differing = sorted(spec.name for spec in previous.symmetric_difference(manifest))
    if empty or differing:
        raise EngineError(
            f"tensor {(empty + differing)[0]} differs from the previous version; a run sends one model."
        )


async def _uncancellable(work: Coroutine[None, None, None]) -> None:
    """Await work to its end, even where the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        # The cancelled caller does not handle its error.
        with suppress(EngineError, TrainerError, asyncio.CancelledError):
            task.result()
        raise
