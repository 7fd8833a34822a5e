"""New weights on their way into SGLang servers: all of them, or none, and never a mixture that serves.

begin -> put ... -> commit: what is staged is what the trainer has
                    hold    the policy stops sending, and ends what runs
                    pause   every server, in abort mode
                    send    the transport; what was loaded is what the trainer has
                    version, caches flushed, resume
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TypeAlias

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.base import Delivery, Transport
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import size_of
from agentrl.weights.staging import Transaction

Servers: TypeAlias = Callable[[], Sequence[Server]]
"""The servers that take part now."""
Hold: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""While it is held, the policy sends nothing, and nothing of what it sent runs."""
Lost: TypeAlias = Callable[[Server, EngineError], None]
"""Told of a server that is not known to serve one whole version: it has to be started again."""

_HEALTH_TIMEOUT_S = 30.0
_LONGEST_VERSION = 9


class SGLangSink:
    """Sends every version to all servers, and keeps a copy of the last one in this process.

    A server that serves always serves one whole version. Where an update fails, the servers get the version
    before it again; one that cannot, or that had none to get, stays paused and is reported as `lost`.

    One update or restoring goes on at a time; the next waits for it. Neither is cut off by a cancellation,
    which takes effect when it has ended.
    """

    def __init__(self, transport: Transport, servers: Servers, hold: Hold, lost: Lost) -> None:
        self._transport = transport
        self._servers = servers
        self._hold = hold
        self._lost = lost
        self._current: Delivery | None = None
        self._updating = asyncio.Lock()

    @property
    def version(self) -> int:
        """The version that all servers were given last; 0 before any."""
        return 0 if self._current is None else self._current.version

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[Transaction]:
        """Start sending `version`; `manifest` lists every tensor that will come.

        Raises:
            EngineError: a tensor is listed twice, has a strange dtype, or differs from the version before.
        """
        if not 0 <= version < 10**_LONGEST_VERSION:
            raise EngineError(f"a version is a number of at most {_LONGEST_VERSION} digits, not {version}.")
        _check_manifest(manifest, self._current)
        yield Transaction(manifest, version, _StagedBuckets(manifest, version, self._deliver))

    async def restore(self, server: Server) -> None:
        """Give a server that was just started the current weights; it may take work afterwards.

        Raises:
            EngineError: it did not get them. It may hold a mixture now, and stays paused: stop it.
        """
        await _uncut(self._restore(server))

    async def close(self) -> None:
        """Wait for what goes on, and leave nothing behind. The servers go on."""
        async with self._updating:
            self._current = None
            await self._transport.close()

    async def _restore(self, server: Server) -> None:
        async with self._updating:
            if self._current is None:
                return
            await self._transport.open([server])
            await server.pause()
            await self._load([server], self._current)
            await server.resume()

    async def _deliver(self, delivery: Delivery) -> None:
        await _uncut(self._update(delivery))

    async def _update(self, delivery: Delivery) -> None:
        async with self._updating:
            servers = tuple(self._servers())
            if not servers:
                raise EngineUnavailableError("no server takes weights; start one, and send them again.")
            opened = False
            try:
                await self._transport.open(servers)
                opened = True
            finally:
                if not opened:
                    await self._report_dead(servers)
            async with self._hold():
                await self._swap(servers, delivery)

    async def _swap(self, servers: Sequence[Server], delivery: Delivery) -> None:
        await self._pause(servers)
        whole = False
        # Whatever breaks, a bug of ours too, may not leave a mixture behind.
        try:
            await self._load(servers, delivery)
            whole = True
        finally:
            if not whole:
                for server in servers:
                    await self._or_lost(server, self._put_back(server))
        self._current = delivery
        for server in servers:
            # It has the new weights whole; whether it still lives is another matter.
            await self._or_lost(server, server.resume())

    async def _pause(self, servers: Sequence[Server]) -> None:
        answers = await asyncio.gather(*(server.pause() for server in servers), return_exceptions=True)
        failed = [answer for answer in answers if answer is not None]
        if not failed:
            return
        for server, answer in zip(servers, answers, strict=True):
            if answer is None:
                await self._or_lost(server, server.resume())
            elif isinstance(answer, EngineError):
                # It may come to pause yet, when nobody expects it.
                self._lost(server, answer)
        raise failed[0]

    async def _load(self, servers: Sequence[Server], delivery: Delivery) -> None:
        loaded = await self._transport.send(servers, delivery)
        for server in servers:
            got = loaded[server].checksum
            if got is not None and got != delivery.checksum:
                raise EngineError(
                    f"{server.url} holds other weights than version {delivery.version} has (checksum {got}, "
                    f"expected {delivery.checksum}); send them again."
                )
        await _all(server.flush() for server in servers)
        await _all(server.set_version(delivery.version) for server in servers)

    async def _put_back(self, server: Server) -> None:
        """Have a server that may hold some of the new weights serve the old ones again."""
        if self._current is None:
            raise EngineError(f"{server.url} has no earlier weights to go back to; restart it.")
        if server.in_doubt:
            raise EngineUnavailableError(f"{server.url} left an update unanswered; restart it.")
        await self._transport.open([server])
        await self._load([server], self._current)
        await server.resume()

    async def _or_lost(self, server: Server, call: Awaitable[None]) -> None:
        try:
            await call
        except EngineError as error:
            self._lost(server, error)

    async def _report_dead(self, servers: Sequence[Server]) -> None:
        well = await asyncio.gather(*(server.healthy(_HEALTH_TIMEOUT_S) for server in servers))
        for server in [server for server, answers in zip(servers, well, strict=True) if not answers]:
            self._lost(server, EngineUnavailableError(f"{server.url} is not there any more; restart it."))


class _StagedBuckets:
    """The buckets of one version. They are kept, not copied: do not change them."""

    def __init__(
        self,
        manifest: Sequence[TensorSpec],
        version: int,
        deliver: Callable[[Delivery], Awaitable[None]],
    ) -> None:
        self._manifest = tuple(manifest)
        self._version = version
        self._deliver = deliver
        self._buckets: list[Bucket] = []
        self._digests: list[int] = []

    async def add(self, bucket: Bucket) -> None:
        self._digests += await asyncio.to_thread(digests_of, bucket)
        self._buckets.append(bucket)

    def checksum(self) -> int:
        return sum_digests(self._digests)

    async def install(self) -> None:
        """Hold, pause, send, compare the checksum of what was loaded, set the version, resume."""
        await self._deliver(Delivery(self._version, self._manifest, tuple(self._buckets), self.checksum()))


def _check_manifest(manifest: Sequence[TensorSpec], current: Delivery | None) -> None:
    names = [spec.name for spec in manifest]
    if not names or len(set(names)) < len(names):
        raise EngineError("a manifest lists every tensor once, and at least one; build it anew.")
    try:
        empty = [spec.name for spec in manifest if size_of(spec) < 0]
    except ValueError as error:
        raise EngineError(f"the manifest makes no sense: {error}; build it anew.") from error
    before = set(manifest if current is None else current.manifest)
    strange = sorted(spec.name for spec in before.symmetric_difference(manifest))
    if empty or strange:
        raise EngineError(
            f"tensor {(empty + strange)[0]} is not what it was in the version before; a run sends one model."
        )


async def _all(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Every call to its end; then the first failure."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def _uncut(work: Coroutine[None, None, None]) -> None:
    """Run work to its end, even where its caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        # Its failure is nobody's any more.
        with suppress(EngineError, asyncio.CancelledError):
            task.result()
        raise
