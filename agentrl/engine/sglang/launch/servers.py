"""Several servers at once, and a router before them: all up, or all gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agentrl.engine.config import incomplete
from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess
from agentrl.errors import ConfigError


def _nothing(sentence: str) -> None:
    """Tell nobody."""
    del sentence


@dataclass(frozen=True, slots=True)
class ServerReplicas:
    """`count` servers that are alike.

    gpus: as CUDA_VISIBLE_DEVICES names them, shared out in order, the same number to each server; none: all
    compute on what this process sees.
    """

    settings: ServerSettings
    count: int = 1
    gpus: Sequence[str] = ()


class Servers:
    """Servers, and a router where there are several; an async context manager.

        async with Servers(ServerReplicas(settings, count=2, gpus=("0", "1")), on_event=print) as servers:
            policy = SGLangPolicy(servers.url)

    groups: all do the same, or there are some that prefill and some that decode, by their settings' role.
    router: False leaves it out.
    on_event: gets a sentence whenever something is starting, is up or is stopping.

    Entering waits until every server is healthy and the router sends to all of them; interrupted, or where
    one does not come up, it leaves nothing. Leaving ends everything, however the block ends, and waits for
    that. Used by one event loop, in whose thread it was entered.

    Raises:
        ConfigError: no server, GPUs that cannot be shared out, or roles that cannot serve together.
    """

    def __init__(
        self, *groups: ServerReplicas, router: bool = True, on_event: Callable[[str], None] = _nothing
    ) -> None:
        self.servers = _servers(groups)
        roles = {server.role for server in self.servers}
        if problem := incomplete(roles):
            raise ConfigError(problem)
        if not router or len(self.servers) == 1:
            self.router = None
        elif roles == {"regular"}:
            self.router = RouterProcess(groups[0].settings)
        else:
            self.router = RouterProcess(groups[0].settings, self.servers)
        self._on_event = on_event
        self._starting: list[asyncio.Task[None]] = []
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
            # A mistake is told before anything is started.
            for server in self.servers:
                await server.command()
            self._on_event(f"starting {_many(len(self.servers))}")
            stack.push_async_callback(self._stop)
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self._starting = [asyncio.create_task(self._started(part)) for part in self._parts]
        # Interrupted, this does not wait for them: `_stop` does, once it has told what it is about.
        ended, _ = await asyncio.wait(self._starting, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            await task
        if self.router is not None:
            for server in self.servers:
                await self.router.add(server.url)
            self._on_event(f"the router sends to {_many(len(self.servers))}")

    async def _started(self, part: Listener) -> None:
        began = time.monotonic()
        await part.start()
        self._on_event(f"{part.name} is up at {part.url} after {time.monotonic() - began:.1f} s")

    async def _stop(self) -> None:
        self._on_event(f"stopping {_many(len(self.servers))}")
        # First all are told, without an await: whoever interrupts the waiting keeps no server alive.
        for task in self._starting:
            task.cancel()
        for part in self._parts:
            part.ask_to_end()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for part in self._parts:
            await part.stop()


def _servers(groups: Sequence[ServerReplicas]) -> tuple[ServerProcess, ...]:
    if not groups:
        raise ConfigError("there is no server to start; name a group of them.")
    for group in groups:
        if group.count < 1 or len(group.gpus) % group.count:
            raise ConfigError(
                f"{len(group.gpus)} GPUs cannot be shared out among {group.count} servers; change either."
            )
    alone = [(group.settings, gpus) for group in groups for gpus in _shares(group)]
    return tuple(
        ServerProcess(settings, name=f"server-{i}", port=port, gpus=gpus)
        for i, ((settings, gpus), port) in enumerate(zip(alone, free_ports(len(alone)), strict=True))
    )


def _shares(group: ServerReplicas) -> list[Sequence[str]]:
    each = len(group.gpus) // group.count
    return [group.gpus[i * each : (i + 1) * each] for i in range(group.count)]


def _many(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
