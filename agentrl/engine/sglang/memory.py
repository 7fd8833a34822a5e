"""The memory that the servers of a fleet have released for a while.

pause -> drain (waits for the last request to end) -> release: SGLang's scheduler crashes where a request
still runs. A server stays paused, also after an update, until nothing is released any more: a token sampled
in between, such as that of a health check, would read memory that is not there. The policy sends no request
until the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import Hold, Lost, Servers, SGLangSink
from agentrl.engine.sglang.transports.base import results_of
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.runtime.activity import RESTS, SERVES
from agentrl.types.seams import MemoryTag


class ServerMemory:
    """Releases memory of all servers, of those that are restarted meanwhile, too, and resumes it.

    servers: those in service. hold: while memory is released, no request is sent. lost: called with a server
    that failed, which has to be restarted. sink: of their weights.
    """

    def __init__(self, servers: Servers, hold: Hold, lost: Lost, sink: SGLangSink) -> None:
        self._servers, self._hold, self._lost, self._sink = servers, hold, lost, sink
        self._held = AsyncExitStack()
        self._without_weights: int | None = None
        self._lock = asyncio.Lock()
        self.tags: set[MemoryTag] = set()

    @property
    def stage(self) -> str:
        """What a server in service does: it rests while memory is released."""
        return RESTS if self.tags else SERVES

    async def release(self, tags: Collection[MemoryTag]) -> int | None:
        """Release this memory of every server.

        Returns:
            the sum (bytes), where every server measures it.

        Raises:
            EngineError: a server refused.
        """
        async with self._lock:
            if not self.tags:
                await self._held.enter_async_context(self._hold())
            self.tags |= set(tags)
            if "weights" in tags:
                self._without_weights = self._sink.num_updates
            freed = await results_of(self._release(server) for server in self._servers())
        sizes = [size for size in freed if size is not None]
        return sum(sizes) if sizes and len(sizes) == len(freed) else None

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        """Allocate this memory again; requests go on when all of it is there.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again;
                a server refused.
        """
        async with self._lock:
            if "kv_cache" in tags and self._without_weights == self._sink.num_updates:
                raise EngineError(
                    "the servers' weights were released; send some, then resume their kv_cache."
                )
            resumed = self.tags & set(tags)
            self.tags -= resumed
            await results_of(self._resume(server, resumed) for server in self._servers())
            if not self.tags:
                self._without_weights = None
                held, self._held = self._held, AsyncExitStack()
                await held.aclose()

    async def give_back(self) -> None:
        """Allocate all of it again in servers that go on running for others, with the weights of the last
        update.

        Raises:
            EngineError: a server refused.
        """
        async with self._lock:
            tags, self.tags = self.tags, set()
            servers = self._servers()
            if "weights" in tags:
                await results_of(self._resume(server, {"weights"}) for server in servers)
                await results_of(self._sink.restore(server) for server in servers)
            await results_of(self._resume(server, tags) for server in servers)
            await self._held.aclose()

    async def renew(self, server: Server) -> None:
        """Release the memory of a server that was restarted, as the others have released theirs.

        Raises:
            EngineError: it refused.
        """
        async with self._lock:
            if self.tags:
                await self._release(server)

    async def _release(self, server: Server) -> int | None:
        tags = self.tags - server.released
        if not tags:
            return 0
        try:
            await server.pause()
            await server.drain()
            freed = await server.release_memory(tags)
        except EngineUnavailableError as error:
            self._lost(server, error)
            return None
        return freed

    async def _resume(self, server: Server, tags: Collection[MemoryTag]) -> None:
        resumed = server.released & set(tags)
        if not resumed:
            return
        try:
            await server.resume_memory(resumed)
            await server.resume()
        except EngineUnavailableError as error:
            self._lost(server, error)
