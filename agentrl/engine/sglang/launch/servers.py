"""Several servers and their router: all of them start, or all are stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from agentrl.engine.config import incomplete
from agentrl.engine.sglang.launch.launcher import (
    Handle,
    Launcher,
    LocalLauncher,
    ServerHandle,
    ServerReplica,
)
from agentrl.engine.sglang.launch.phases import started
from agentrl.engine.sglang.launch.process import ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess, router_of
from agentrl.errors import ConfigError


def _ignore(sentence: str) -> None:
    del sentence


def _ignore_phase(server: ServerHandle, phase: str) -> None:
    del server, phase


@dataclass(frozen=True, slots=True)
class ServerReplicas:
    """`count` servers with the same settings.

    gpus: as in CUDA_VISIBLE_DEVICES, assigned in order, the same number to each server; none: all servers use
    the GPUs of this process, or those of their place in a cluster.
    """

    settings: ServerSettings
    count: int = 1
    gpus: Sequence[str] = ()


class Servers:
    """Servers, and a router where there are several; an async context manager.

        async with Servers(ServerReplicas(settings, count=2, gpus=("0", "1")), on_event=print) as servers:
            policy = SGLangPolicy(servers.url)

    groups: all with the role `regular`, or some with `prefill` and some with `decode`.
    router: False leaves it out. A single server has one, too, where it asks for a key: clients of this
    machine need none, unless the router listens for those of other machines, too.
    launcher: where the servers run; the router runs here.
    on_event: called with a sentence whenever a process is starting, is up or is stopping.
    entered: called with each server and the phase of its start that begins (see `phases`).

    Entering waits until every server is healthy and the router sends to all of them; on interruption, or
    where a server does not start, all of them are stopped. Leaving stops all processes, also after an error,
    and waits for their end. Used by one event loop, in whose thread it was entered.

    Raises:
        ConfigError: no server, GPUs that cannot be divided evenly, or roles that cannot serve together.
    """

    def __init__(
        self,
        *groups: ServerReplicas,
        router: bool = True,
        on_event: Callable[[str], None] = _ignore,
        launcher: Launcher | None = None,
        entered: Callable[[ServerHandle, str], None] = _ignore_phase,
    ) -> None:
        launcher = launcher or LocalLauncher()
        self.servers = launcher.servers(_replicas(groups))
        roles = {server.role for server in self.servers}
        if problem := incomplete(roles):
            raise ConfigError(problem)
        is_alone = len(self.servers) == 1 and self.servers[0].key is None
        has_router = router and not is_alone
        self.router = router_of(groups[0].settings, launcher, self.servers) if has_router else None
        self._on_event, self._entered = on_event, entered
        self._starting: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()

    @property
    def _processes(self) -> tuple[Handle, ...]:
        return self.servers if self.router is None else (self.router, *self.servers)

    @property
    def url(self) -> str:
        """The address for requests: of the router, or of the only server."""
        return self.servers[0].url if self.router is None else self.router.url

    async def __aenter__(self) -> Self:
        """Start all processes concurrently.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: a server, or the router, does not start.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._stop)
            # A wrong argument raises before any server is started. The first check on a machine takes the
            # longest; the others there know its result.
            await self.servers[0].check()
            await asyncio.gather(*(server.check() for server in self.servers[1:]))
            if self.router is not None:
                await self.router.command()
            self._on_event(f"starting {_count(len(self.servers))}")
            await self._start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        router = [] if self.router is None else [self._start_router(self.router)]
        starts = [*router, *map(self._start_one, self.servers)]
        self._starting = [asyncio.create_task(start) for start in starts]
        # On interruption this does not wait for the tasks: `_stop` does, after it has reported the event.
        ended, _ = await asyncio.wait(self._starting, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            await task
        if self.router is not None:
            for server in self.servers:
                await self.router.add(server.url)
            self._on_event(f"the router sends to {_count(len(self.servers))}")

    async def _start_one(self, server: ServerHandle) -> None:
        took = await started(server, partial(self._entered, server))
        parts = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in took.items())
        self._on_event(f"{server.name} is up at {server.url} after {sum(took.values()):.1f} s: {parts}")

    async def _start_router(self, router: RouterProcess) -> None:
        began_s = time.monotonic()
        await router.start()
        self._on_event(f"{router.name} is up at {router.url} after {time.monotonic() - began_s:.1f} s")

    async def _stop(self) -> None:
        if self._starting:
            self._on_event(f"stopping {_count(len(self.servers))}")
        # All get the signal first, without an await: so an interruption of the wait keeps no server running.
        for task in self._starting:
            task.cancel()
        for process in self._processes:
            process.terminate()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for process in self._processes:
            await process.stop()


def _replicas(groups: Sequence[ServerReplicas]) -> list[ServerReplica]:
    if not groups:
        raise ConfigError("there is no server to start; name a group of them.")
    for group in groups:
        if group.count < 1 or len(group.gpus) % group.count:
            raise ConfigError(
                f"{len(group.gpus)} GPUs cannot be divided evenly among {group.count} servers; change either."
            )
    shares = [(group.settings, gpus) for group in groups for gpus in _shares(group)]
    return [ServerReplica(f"server-{i}", settings, gpus) for i, (settings, gpus) in enumerate(shares)]


def _shares(group: ServerReplicas) -> list[Sequence[str]]:
    num_gpus = len(group.gpus) // group.count
    return [group.gpus[i * num_gpus : (i + 1) * num_gpus] for i in range(group.count)]


def _count(count: int) -> str:
    return "1 server" if count == 1 else f"{count} servers"
