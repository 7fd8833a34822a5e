"""Several servers at once, and a router before them: all up, or all gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from agentrl.engine.sglang.launch.listener import Listener
from agentrl.engine.sglang.launch.ports import free_ports
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess
from agentrl.errors import ConfigError


def _nothing(sentence: str) -> None:
    """Tell nobody."""
    del sentence


class Servers:
    """`count` servers, and a router where there are several; an async context manager.

        async with Servers(settings, count=2, gpus=("0", "1"), say=print) as servers:
            policy = SGLangPolicy(servers.url)

    gpus: as CUDA_VISIBLE_DEVICES names them, shared out in order, the same number to each server; none: all
    servers compute on what this process sees. router: False leaves it out.
    say: is told, in a sentence each, what is being started, is up, is being stopped.

    Entering waits until every server is healthy and the router sends to all of them; interrupted, or where
    one does not come up, it leaves nothing. Leaving ends everything, however the block ends, and waits for
    that. Used by one event loop, in whose thread it was entered.

    Raises:
        ConfigError: no server, or GPUs that cannot be shared out.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        count: int = 1,
        gpus: Sequence[str] = (),
        router: bool = True,
        say: Callable[[str], None] = _nothing,
    ) -> None:
        if count < 1 or len(gpus) % count:
            raise ConfigError(f"{len(gpus)} GPUs cannot be shared out among {count} servers; change either.")
        each = len(gpus) // count
        self.settings = settings
        self.servers = tuple(
            ServerProcess(settings, name=f"server-{i}", port=port, gpus=gpus[i * each : (i + 1) * each])
            for i, port in enumerate(free_ports(count))
        )
        several = router and count > 1
        self.router = RouterProcess(settings) if several else None
        self._say = say
        self._stack = AsyncExitStack()

    @property
    def _parts(self) -> tuple[Listener, ...]:
        return self.servers if self.router is None else (self.router, *self.servers)

    @property
    def url(self) -> str:
        """Where requests go: the router, or the only server."""
        return self.servers[0].url if self.router is None else self.router.url

    async def __aenter__(self) -> Self:
        """Start everything at once.

        Raises:
            ConfigError: the interpreter, or an argument.
            EngineUnavailableError: a server, or the router, does not come up.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            # A mistake is told before anything is started.
            await self.servers[0].command()
            self._say(f"starting {_many(len(self.servers))}")
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        await _all_of([self._started(part) for part in self._parts])
        if self.router is not None:
            for server in self.servers:
                await self.router.add(server.url)
            self._say(f"the router sends to {_many(len(self.servers))}")

    async def _started(self, part: Listener) -> None:
        began = time.monotonic()
        await part.start()
        self._say(f"{part.name} is up at {part.url} after {time.monotonic() - began:.1f} s")

    async def _stop(self) -> None:
        if any(part.running for part in self._parts):
            self._say(f"stopping {_many(len(self.servers))}")
        # First all are told, without an await: whoever interrupts the waiting keeps no server alive.
        for part in self._parts:
            part.ask_to_end()
        for part in self._parts:
            await part.stop()


async def _all_of(works: Sequence[Awaitable[None]]) -> None:
    """Wait for all; where one fails, the others are cancelled and its error is raised by itself."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _many(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
