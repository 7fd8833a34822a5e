"""SGLang servers as one engine: one that dies or hangs is started again, and gets the weights first.

Consumes: requests, weights. Waits for: servers. A server that is in trouble gets no more requests: the router
forgets it, or, where it was the last one of its role, all requests are held. What it was working on is asked
for anew, of another or of the same one when it is back. Ends: with `close`; what it holds goes with it, the
servers too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from agentrl.engine.sglang.client import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Transport
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Sampling, TensorSpec, WeightTransaction
from agentrl.types import Completion

_LOOK_S = 0.1
_LONGEST_WAIT_S = 60.0
_COMMITS = 3
_AGAIN = ("retries", "lost", "resumed")


class Process(Protocol):
    """A server that can be started, and started again at the same address."""

    name: str

    @property
    def role(self) -> str:
        """What it does, of the work on a request; each role needs a server."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def running(self) -> bool:
        """Whether its process is there."""

    @property
    def returncode(self) -> int | None:
        """How it ended."""

    async def start(self) -> None:
        """Start it, wait until it is healthy."""

    async def stop(self) -> None:
        """End it, and all that it started."""


class Router(Protocol):
    """What sends requests to several servers. Started again, it knows none."""

    @property
    def running(self) -> bool:
        """Whether its process is there."""

    async def start(self) -> None:
        """Start it again, wait until it answers."""

    async def add(self, url: str) -> None:
        """Send requests to a server."""

    async def remove(self, url: str) -> None:
        """Send no more requests to a server."""


@dataclass(frozen=True, slots=True)
class Health:
    """How servers are watched: asked every interval_s whether they are well, and dead after timeout_s.

    A process that has ended is seen at once.
    """

    interval_s: float = 10.0
    timeout_s: float = 30.0


class Incident(NamedTuple):
    """A server that was in trouble: why, and for how long its place was empty (seconds)."""

    server: str
    reason: str
    down_s: float


def _silently(sentence: str) -> None:
    del sentence


@dataclass(eq=False, slots=True)
class _Member:
    """A server. serves: takes part in updates. routed: requests may go there. trouble: why they may not."""

    process: Process
    control: Server
    serves: bool = True
    routed: bool = True
    trouble: str = ""


@dataclass(eq=False)
class Fleet:
    """The engine that these servers are. They run already.

    policy: sends requests to them, through the router where there is one.
    transport: how weights get to them. end: ends them; `close` calls it last.
    on_event: gets a sentence whenever a server starts or ends.
    incidents: servers that were replaced, in order.
    """

    processes: Sequence[Process]
    router: Router | None
    policy: SGLangPolicy
    transport: Transport
    end: Callable[[], Awaitable[None]]
    health: Health = Health()
    on_event: Callable[[str], None] = _silently
    incidents: list[Incident] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._members = [_Member(process, Server(process.url)) for process in self.processes]
        self._sink = SGLangSink(self.transport, self._taking_weights, self._held, self._lost)
        self._updating = False
        self._restarts = 0
        self._can_serve = asyncio.Event()
        self._can_serve.set()
        self._blocked: AsyncExitStack | None = None
        self._blocking = asyncio.Lock()
        self._watchers: list[asyncio.Task[None]] = []

    def watch(self) -> Self:
        """Begin to watch the servers."""
        self._watchers = [asyncio.create_task(self._watch(member)) for member in self._members]
        if self.router is not None:
            self._watchers.append(asyncio.create_task(self._watch_router(self.router)))
        return self

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.policy.url

    @property
    def version(self) -> int:
        """The version that all servers were given last; 0 before any."""
        return self._sink.version

    @property
    def sink(self) -> FleetSink:
        """Where new weights go: to every server, and later to those that come back."""
        return FleetSink(self._sink, self._can_serve)

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests sent again, by why, and servers that had to be started again (`restarts`)."""
        return {name: self.policy.counts[name] for name in _AGAIN} | {"restarts": self._restarts}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """See `SGLangPolicy.generate`."""
        return await self.policy.generate(prompt_ids, sampling, session=session)

    async def close_session(self, session: str) -> None:
        """End a request that runs in the session."""
        await self.policy.close_session(session)

    async def abort(self) -> None:
        """End every request with what it has."""
        await self.policy.abort()

    async def close(self) -> None:
        """Watch no longer, end all requests, let go of the copy of the weights, end the servers.

        A watcher that broke is raised at the end.
        """
        for watcher in self._watchers:
            watcher.cancel()
        try:
            ended = await asyncio.gather(*self._watchers, return_exceptions=True)
            await self.policy.close()
            await self._sink.close()
            for member in self._members:
                await member.control.close()
        finally:
            await self.end()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    @property
    def _failed_requests(self) -> int:
        """Some server may be in trouble where this has grown."""
        return self.policy.counts["lost"] + self.policy.counts["retries"]

    def _taking_weights(self) -> list[Server]:
        return [member.control for member in self._members if member.serves]

    @property
    def _serves(self) -> bool:
        """Whether every role has a server that serves."""
        roles = {member.process.role for member in self._members}
        return roles == {member.process.role for member in self._members if member.serves}

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        async with self.policy.held():
            # A server that is paused may answer nobody that it is well.
            self._updating = True
            try:
                yield
            finally:
                self._updating = False

    def _lost(self, server: Server, error: EngineError) -> None:
        for member in self._members:
            if member.control is server:
                self._out(member, str(error))

    def _out(self, member: _Member, reason: str) -> None:
        member.serves = member.routed = False
        member.trouble = reason
        if not self._serves:
            self._can_serve.clear()

    async def _watch(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        look_at, failed = loop.time() + self.health.interval_s, self._failed_requests
        while True:
            due = loop.time() > look_at or self._failed_requests > failed
            if not member.process.running:
                self._out(member, f"it ended (exit code {member.process.returncode})")
            elif due and not self._updating:
                failed = self._failed_requests
                if await self._hangs(member):
                    self._out(member, f"it is not well, or did not say so in {self.health.timeout_s:g} s")
                look_at = loop.time() + self.health.interval_s
            if member.trouble:
                await self._replace(member)
            await asyncio.sleep(_LOOK_S)

    async def _hangs(self, member: _Member) -> bool:
        if await member.control.healthy(self.health.timeout_s) or self._updating:
            return False
        await asyncio.sleep(_LOOK_S)  # one that has just ended does not hang
        return member.process.running

    async def _watch_router(self, router: Router) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if not router.running:
                self._restarts += 1
                self.on_event("the router ended; it is started again.")
                async with self.policy.held():
                    await self._retried("the router", lambda: self._restart_router(router))

    async def _restart_router(self, router: Router) -> None:
        await router.start()
        for member in self._members:
            if member.routed:
                await router.add(member.process.url)

    async def _retried(self, name: str, bring_back: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            try:
                return await bring_back()
            except EngineError as error:
                failures += 1
                wait_s = min(_LONGEST_WAIT_S, 2.0**failures)
                self.on_event(f"{name} does not come back: {error} Once more in {wait_s:g} s.")
                await asyncio.sleep(wait_s)

    async def _replace(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        began, reason = loop.time(), member.trouble
        self._restarts += 1
        self.on_event(f"{member.process.name}: {reason}; it is started again.")
        if self.router is not None:
            with suppress(EngineError):
                await self.router.remove(member.process.url)
        # What hangs in it is free when it is dead; then it can be held, where nobody else is there.
        await member.process.stop()
        await self._block()
        while member.trouble:
            await self._retried(member.process.name, lambda: self._bring_back(member))
        self.incidents.append(Incident(member.process.name, reason, loop.time() - began))
        self.on_event(f"{member.process.name} is back after {self.incidents[-1].down_s:.1f} s.")

    async def _bring_back(self, member: _Member) -> None:
        """Start a server, give it the weights, then requests."""
        member.serves = False
        await member.process.start()
        await member.control.close()
        member.control = Server(member.process.url)
        # From here on it takes part in updates, so that none is missed between its weights and its requests.
        member.serves, member.trouble = True, ""
        whole = False
        try:
            await self._sink.restore(member.control)
            if self.router is not None:
                await self.router.add(member.process.url)
            whole = not member.trouble
        finally:
            if not whole:
                self._out(member, member.trouble or "it did not get its weights")
        if whole:
            member.routed = True
            if self._serves:
                self._can_serve.set()
            await self._block()

    async def _block(self) -> None:
        """Hold requests while they cannot be served, and let them go on as soon as one does."""
        async with self._blocking:
            if self._serves and self._blocked is not None:
                await self._blocked.aclose()
                self._blocked = None
            elif not self._serves and self._blocked is None:
                self._blocked = AsyncExitStack()
                await self._blocked.enter_async_context(self.policy.held())


class FleetSink:
    """The sink of a fleet. Where a server dies over an update, the others get it, and it when it is back."""

    def __init__(self, sink: SGLangSink, can_serve: asyncio.Event) -> None:
        self._sink, self._can_serve = sink, can_serve

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[FleetTransaction]:
        """See `SGLangSink.begin`."""
        async with self._sink.begin(manifest, version) as transaction:
            yield FleetTransaction(transaction, self._can_serve)


class FleetTransaction:
    """The weights of one version on their way into a fleet."""

    def __init__(self, transaction: WeightTransaction, can_serve: asyncio.Event) -> None:
        self._transaction, self._can_serve = transaction, can_serve
        self.put = transaction.put

    async def commit(self, checksum: int) -> None:
        """See `Transaction.commit`; waits for a server where none serves.

        Raises:
            EngineUnavailableError: servers died over it again and again.
        """
        for left in reversed(range(_COMMITS)):
            await self._can_serve.wait()
            try:
                await self._transaction.commit(checksum)
            except EngineUnavailableError:
                if not left:
                    raise
            else:
                break
