"""SGLang servers as one engine: a server that crashes or hangs is restarted, and gets the weights first.

Consumes: requests, weights. Waits for: servers. A failed server gets no more requests: it is removed from the
router, or, where it was the last one of its role, all requests are held. Its running requests are sent again,
to another server or to the restarted one; those of a server whose machine is going away go on from their
tokens so far. Ends: with `close`, which also ends the servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from agentrl.engine.sglang.client import SGLangPolicy
from agentrl.engine.sglang.clients import Clients
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.fleet_sink import FleetSink
from agentrl.engine.sglang.memory import ServerMemory
from agentrl.engine.sglang.processes import Process, Router
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Transport
from agentrl.errors import AgentRLError, EngineError
from agentrl.processes.ray.draining import in_words
from agentrl.runtime.activity import ENDED, LOADS, OUT, SERVES, STARTS, current_activities
from agentrl.types import Completion
from agentrl.types.seams import MemoryTag, Sampling, Watch
from agentrl.types.statistics import SPECULATION

_POLL_S = 0.1
_LONGEST_WAIT_S = 60.0
_RETRY_COUNTS = ("retries", "lost", "resumed", "interrupted")


@dataclass(frozen=True, slots=True)
class Health:
    """The health checks of servers: one every interval_s; a server fails it after timeout_s.

    A process that has exited is detected at once.
    """

    interval_s: float = 10.0
    timeout_s: float = 30.0


class Incident(NamedTuple):
    """The failure of a server: its reason, and the time until its replacement was up (seconds)."""

    server: str
    reason: str
    down_s: float


def _ignore(sentence: str) -> None:
    del sentence


class _Member:
    """A server, and the control of it.

    serves: takes part in updates. routed: gets requests. trouble: why it is out of service.
    """

    def __init__(self, process: Process, headers: Mapping[str, str]) -> None:
        self.process, self._headers = process, headers
        self.control = Server(process.url, headers)
        self.serves = self.routed = True
        self.trouble = ""

    async def connect_again(self) -> None:
        """Control its next process, which may have another address."""
        await self.control.close()
        self.control = Server(self.process.url, self._headers)


class Membership:
    """The servers of a fleet, which of them are in service, and what each of them does.

    title, headers: see `Fleet`. version: that of the servers in service.
    members: all servers. can_serve: set while every role has a server in service that gets requests.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        headers: Mapping[str, str],
        title: str,
        version: Callable[[], int],
    ) -> None:
        self.members = [_Member(process, headers) for process in processes]
        self.can_serve = asyncio.Event()
        self.can_serve.set()
        self._title, self._version = title, version
        self._activities = current_activities()

    def in_service(self) -> list[Server]:
        """The servers that take part in updates."""
        return [member.control for member in self.members if member.serves]

    @property
    def serves(self) -> bool:
        """Whether every role has a server in service that gets requests."""
        roles = {member.process.role for member in self.members}
        return roles == {member.process.role for member in self.members if member.serves and member.routed}

    def lost(self, server: Server, error: EngineError) -> None:
        """Take a server out of service for an error of a call of it."""
        for member in self.members:
            if member.control is server:
                self.mark_failed(member, str(error))

    def mark_failed(self, member: _Member, reason: str) -> None:
        """Take a server out of service."""
        if member.trouble != reason:
            self.enter(member, OUT, reason)
        member.serves = member.routed = False
        member.trouble = reason
        if not self.serves:
            self.can_serve.clear()

    def mark_routed(self, member: _Member, stage: str) -> None:
        """A server gets requests from now on, and enters a stage."""
        member.routed = True
        self.enter(member, stage)
        if self.serves:
            self.can_serve.set()

    def enter_all(self, stage: str) -> None:
        """All servers that requests may go to enter a stage."""
        for member in self.members:
            if member.serves and member.routed:
                self.enter(member, stage)

    def enter(self, member: _Member, stage: str, what: str = "") -> None:
        """A server enters a stage; one in service has the version that was sent last."""
        if self._activities is not None:
            version = self._version() if stage == SERVES else None
            name, where = f"{self._title}{member.process.name}", member.process.url
            self._activities.enter(name, stage, what, where=where, version=version)

    async def close(self) -> None:
        """Close the connections to the servers: for this fleet they have ended."""
        for member in self.members:
            await member.control.close()
            self.enter(member, ENDED)


@dataclass(eq=False, kw_only=True)
class ServerSupervisor:
    """Watches the servers and the router, and restarts those that crash, hang or lose their machine.

    sink: sends a restarted server its weights. memory: releases what the others have released.
    health, on_event: see `Fleet`.
    updating: all servers get new weights; meanwhile a paused one may fail its health check.
    restarts: of servers and the router (count). incidents: servers that were replaced, in order.
    """

    membership: Membership
    router: Router | None
    clients: Clients
    sink: SGLangSink
    memory: ServerMemory
    health: Health
    on_event: Callable[[str], None]
    updating: bool = field(default=False, init=False)
    restarts: int = field(default=0, init=False)
    incidents: list[Incident] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._held_requests: AsyncExitStack | None = None
        self._hold_lock = asyncio.Lock()
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the tasks that watch."""
        self._watchers = [asyncio.create_task(self._watch(member)) for member in self.membership.members]
        if self.router is not None:
            self._watchers.append(asyncio.create_task(self._watch_router(self.router)))

    async def stop(self) -> list[Exception]:
        """End these tasks; returns the errors of those that had failed."""
        for watcher in self._watchers:
            watcher.cancel()
        ended = await asyncio.gather(*self._watchers, return_exceptions=True)
        return [error for error in ended if isinstance(error, Exception)]

    @property
    def _failed_requests(self) -> int:
        """The number of failed requests; an increase triggers a health check."""
        counts = self.clients.counts
        return counts.get("lost", 0) + counts.get("retries", 0)

    async def _watch(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        next_check, num_failed = loop.time() + self.health.interval_s, self._failed_requests
        while True:
            check_due = loop.time() > next_check or self._failed_requests > num_failed
            if not member.process.running:
                self.membership.mark_failed(member, member.process.end_reason)
            elif (left_s := member.process.left_s) is not None and not self.updating:
                reason = f"its machine is going away{in_words(left_s)}, and its requests go on elsewhere"
                self.membership.mark_failed(member, reason)
                await self._hand_over(member)
            elif check_due and not self.updating and not self.memory.tags:
                num_failed = self._failed_requests
                if await self._hangs(member):
                    reason = f"it failed its health check of {self.health.timeout_s:g} s"
                    self.membership.mark_failed(member, reason)
                next_check = loop.time() + self.health.interval_s
            if member.trouble:
                await self._replace(member)
            await asyncio.sleep(_POLL_S)

    async def _hand_over(self, member: _Member) -> None:
        """Have the requests of a server go on at others from their tokens so far; without others, later."""
        await self._hold_or_resume(partial(_end_requests, [member.control]))
        if self.router is not None:
            with suppress(EngineError):
                await self.router.remove(member.process.url)
        with suppress(EngineError):
            await member.control.end_all()

    async def _hangs(self, member: _Member) -> bool:
        if await member.control.healthy(self.health.timeout_s) or self.updating or self.memory.tags:
            return False
        await asyncio.sleep(_POLL_S)  # a process that has just exited does not hang
        return member.process.running

    async def _watch_router(self, router: Router) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if not router.running:
                self.restarts += 1
                self.on_event(f"the router: {router.end_reason}; it is restarted. {router.log_tail()}")
                async with self.clients.held():
                    await self._retry_until_up("the router", lambda: self._restart_router(router))

    async def _restart_router(self, router: Router) -> None:
        await router.start()
        for member in self.membership.members:
            if member.routed:
                await router.add(member.process.url)

    async def _retry_until_up(self, name: str, restart: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            try:
                return await restart()
            # Also what only its machine knows, such as an interpreter that is missing there.
            except (AgentRLError, OSError) as error:
                failures += 1
                wait_s = min(_LONGEST_WAIT_S, 2.0**failures)
                self.on_event(f"{name} was not restarted: {error} The next attempt is in {wait_s:g} s.")
                await asyncio.sleep(wait_s)

    async def _replace(self, member: _Member) -> None:
        loop = asyncio.get_running_loop()
        started, reason = loop.time(), member.trouble
        self.restarts += 1
        tail = "" if member.process.left_s is not None else f" {member.process.log_tail()}"
        self.on_event(f"{member.process.name}: {reason}; it is restarted.{tail}")
        if self.router is not None:
            with suppress(EngineError):
                await self.router.remove(member.process.url)
        # Requests that hang in it fail when it is stopped: only then can they be held, where no other is up.
        await member.process.stop()
        if member.process.running and self.membership.serves:
            # It belongs to another owner. What hangs in it is sent again; all others pause for as long.
            async with self.clients.held():
                pass
        await self._hold_or_resume()
        while member.trouble:
            await self._retry_until_up(member.process.name, lambda: self._restart(member))
        self.incidents.append(Incident(member.process.name, reason, loop.time() - started))
        self.on_event(f"{member.process.name} is back after {self.incidents[-1].down_s:.1f} s.")

    async def _restart(self, member: _Member) -> None:
        """Start a server, send it the weights, then route requests to it."""
        member.serves = False
        self.membership.enter(member, STARTS)
        is_up = False
        try:
            await member.process.start()
            is_up = True
        finally:
            if not is_up:
                self.membership.enter(member, OUT, member.trouble)
        await member.connect_again()
        # From here on it takes part in updates, so that it misses none between its weights and its requests.
        member.serves, member.trouble = True, ""
        complete = False
        self.membership.enter(member, LOADS)
        try:
            await self.sink.restore(member.control)
            await self.memory.renew(member.control)
            if self.router is not None:
                await self.router.add(member.process.url)
            complete = not member.trouble
        finally:
            if not complete:
                self.membership.mark_failed(member, member.trouble or "it did not get its weights")
        if complete:
            self.membership.mark_routed(member, self.memory.stage)
            await self._hold_or_resume()

    async def _hold_or_resume(self, abort_all: Callable[[], Awaitable[None]] | None = None) -> None:
        """Hold requests while a role has no server in service, and resume them afterwards; see `held`."""
        async with self._hold_lock:
            if self.membership.serves and self._held_requests is not None:
                await self._held_requests.aclose()
                self._held_requests = None
            elif not self.membership.serves and self._held_requests is None:
                self._held_requests = AsyncExitStack()
                await self._held_requests.enter_async_context(self.clients.held(abort_all))


async def _end_requests(servers: Sequence[Server]) -> None:
    # A server that is down, or hangs, must not keep the others from ending theirs.
    calls = (server.abort_all() for server in servers)
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result


@dataclass(eq=False)
class Fleet:
    """Several servers as one engine. They run already.

    policy: sends requests to them, through the router where there is one.
    transport: of weights to them. end: stops them; `close` calls it last.
    on_event: called with a sentence whenever a server starts or ends.
    title: before the names of servers, in the status and the timeline of the run.
    stays: whether the servers go on running for others after `end`.
    headers: of control calls (`Authorization`).
    clients: all that send requests to the servers; other processes are added to them.
    """

    processes: Sequence[Process]
    router: Router | None
    policy: SGLangPolicy
    transport: Transport
    end: Callable[[], Awaitable[None]]
    health: Health = Health()
    on_event: Callable[[str], None] = _ignore
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    title: str = ""
    stays: bool = False

    def __post_init__(self) -> None:
        self.clients = Clients(self.policy)
        self._membership = Membership(self.processes, self.headers, self.title, lambda: self.version)
        in_service, lost = self._membership.in_service, self._membership.lost
        self._sink = SGLangSink(self.transport, in_service, self._held, lost)
        self._memory = ServerMemory(in_service, self.clients.held, lost, self._sink)
        self._supervisor = ServerSupervisor(
            membership=self._membership,
            router=self.router,
            clients=self.clients,
            sink=self._sink,
            memory=self._memory,
            health=self.health,
            on_event=self.on_event,
        )

    def watch(self) -> Self:
        """Start the tasks that monitor the servers and the router."""
        self._supervisor.start()
        self._show_service()
        return self

    @property
    def url(self) -> str:
        """The address for requests."""
        return self.policy.url

    @property
    def version(self) -> int:
        """The version that was last sent to all servers; 0 before the first."""
        return self._sink.version

    @property
    def sink(self) -> FleetSink:
        """The sink of new weights, for every server; a restarted server gets the latest version."""
        return FleetSink(self._sink, self._membership.can_serve)

    @property
    def counts(self) -> Mapping[str, int]:
        """Requests sent again, by reason, and restarts of servers (`restarts`); of drafts, `SPECULATION`."""
        counts = self.clients.counts
        drafts = {name: counts[name] for name in SPECULATION if counts.get(name)}
        sent_again = {name: counts.get(name, 0) for name in _RETRY_COUNTS}
        return {**sent_again, "restarts": self._supervisor.restarts, **drafts}

    @property
    def incidents(self) -> Sequence[Incident]:
        """The servers that were replaced, in order."""
        return self._supervisor.incidents

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """See `SGLangPolicy.generate`."""
        return await self.policy.generate(prompt_ids, sampling, session=session)

    def watched(self, session: str, watch: Watch) -> AbstractContextManager[None]:
        """See `SGLangPolicy.watched`."""
        return self.policy.watched(session, watch)

    async def close_session(self, session: str) -> None:
        """End a request that runs in the session."""
        await self.policy.close_session(session)

    async def abort(self) -> None:
        """End every request with its tokens so far."""
        await self.policy.abort()

    async def release_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Free this memory of every server, and hold all requests; see `Engine`.

        Raises:
            EngineError: a server refused.
        """
        freed = await self._memory.release(tags)
        self._show_service()
        return freed

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate released memory again; see `Engine`.

        Raises:
            EngineError: the weights that were released have not been sent again; a server refused.
        """
        await self._memory.resume(tags)
        self._show_service()

    async def profile(self, folder: Path, num_steps: int) -> None:
        """Have each server trace its next forward passes (count) below a folder, which it has to reach.

        Raises:
            EngineError: a server refused.
        """
        servers = enumerate(self._membership.in_service())
        await asyncio.gather(*(each.profile(str(folder / f"server-{n}"), num_steps) for n, each in servers))

    async def close(self) -> None:
        """Stop the watchers, end all requests, free the copy of the weights, stop the servers.

        The error of a watcher that failed is raised at the end.
        """
        try:
            failures = await self._supervisor.stop()
            await self.policy.close()
            if self.stays and self._memory.tags:
                with suppress(EngineError):
                    await self._memory.give_back()
            await self._sink.close()
            await self._membership.close()
        finally:
            await self.end()
        for error in failures:
            raise error

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[float]:
        async with self.clients.held(lambda: _end_requests(self._membership.in_service())) as still_since:
            self._supervisor.updating = True
            self._membership.enter_all(LOADS)
            try:
                yield still_since
            finally:
                self._supervisor.updating = False
                self.policy.salt = self._sink.salt
                self._show_service()

    def _show_service(self) -> None:
        """Show that the servers serve, if they have their memory."""
        self._membership.enter_all(self._memory.stage)
