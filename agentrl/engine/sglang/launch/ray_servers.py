"""Servers on the machines of a Ray cluster: the driver's side. An actor starts each in its allocation.

consumes: starts and stops. waits for: the actor's replies. unblocked by: the replies, or the end of the actor
or of its machine. on shutdown: `stop` ends the server, then its actor. Ray ends the actor when this process
is gone, however it ended, and the kernel ends the server with its actor.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from agentrl.engine.config import Role
from agentrl.engine.sglang.launch.hosted import HostedServer
from agentrl.engine.sglang.launch.launcher import ServerReplica
from agentrl.engine.sglang.launch.listener import HOST, tail_of, url_of
from agentrl.engine.sglang.launch.process import ServerSettings, parts_of
from agentrl.errors import ConfigError, EngineUnavailableError, RemoteError
from agentrl.processes.placement import Allocation
from agentrl.processes.ray.actors import ActorObject
from agentrl.processes.ray.session import RaySession
from agentrl.processes.remote import PendingCall

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

R = TypeVar("R")

_POLL_S = 0.05
_SIGNAL_INTERVAL_S = 0.5
_STOP_S = 15.0
_KEY_BYTES = 32


class RayLauncher:
    """Starts each server of a fleet in an actor, in the allocations of a placement, in order.

    A server on this machine listens on the loopback address and asks for no key, as without Ray. One on
    another machine listens on that machine's address, and asks for a key that is random for each launcher.
    Where clients are on other machines, all servers and the router do so.

    ranks: the allocations of the trainer's ranks, which send weights to the servers. clients: those of the
    players, which send them requests. title: before the names of servers, in Ray's lists.
    """

    def __init__(
        self,
        session: RaySession,
        group: PlacementGroup,
        allocations: Sequence[Allocation],
        ranks: Sequence[Allocation] = (),
        clients: Sequence[Allocation] = (),
        *,
        title: str = "",
    ) -> None:
        self._title = title
        self._session, self._group, self._allocations = session, group, tuple(allocations)
        self.is_local = self._are_here(allocations)
        # Where one of these is going away, the run ends.
        self._staying = {session.node, *(allocation.node for allocation in ranks)}
        self.host = HOST if self.is_local and self._are_here(ranks) else session.host
        self.router_host = HOST if self._are_here(clients) else session.host
        needs_key = not self.is_local or self.router_host != HOST
        self.key = secrets.token_hex(_KEY_BYTES) if needs_key else None

    def servers(self, replicas: Sequence[ServerReplica]) -> tuple[RayServer | SpreadServer, ...]:
        """The servers, in order; their GPUs are those of their allocations."""
        places = iter(self._allocations)
        return tuple(
            self._server(replica, list(islice(places, replica.settings.machines))) for replica in replicas
        )

    def _server(self, replica: ServerReplica, allocations: Sequence[Allocation]) -> RayServer | SpreadServer:
        """A server in its allocations, one for each machine."""
        parts = [
            RayServer(
                _Place(self._session, self._group, allocation, allocation.node not in self._staying),
                f"{replica.name}-{rank}" if rank else replica.name,
                self._placed(settings, allocation),
                title=self._title,
            )
            for rank, (settings, allocation) in enumerate(
                zip(parts_of(replica.settings, allocations[0].host), allocations, strict=True)
            )
        ]
        return parts[0] if len(parts) == 1 else SpreadServer(parts)

    def _are_here(self, allocations: Sequence[Allocation]) -> bool:
        return all(allocation.node == self._session.node for allocation in allocations)

    def _placed(self, settings: ServerSettings, allocation: Allocation) -> ServerSettings:
        entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        settings = replace(settings, python_path=(*settings.python_path, *map(Path, entries)))
        if self.host != HOST:
            settings = replace(settings, rendezvous_host=self.host)
        if allocation.node == self._session.node and self.router_host == HOST:
            return settings
        return replace(settings, host=allocation.host, key=self.key)


class _Place(NamedTuple):
    """Where a server runs. may_move: its machine may go away before the run ends."""

    session: RaySession
    group: PlacementGroup
    allocation: Allocation
    may_move: bool


class RayServer:
    """An SGLang server that an actor starts on its machine; see `Handle`. Each start has a new actor.

    Its log here is that of the actor and of the server. It keeps its port from one start to the next, unless
    Ray has moved its bundle to another machine. title: before its name in Ray's lists.
    """

    def __init__(self, place: _Place, name: str, settings: ServerSettings, *, title: str = "") -> None:
        self.name, self.settings, self.allocation = name, settings, place.allocation
        self._place, self._node, self._listed = place, place.allocation.node, f"{title}{name}"
        self.log = settings.log_folder / f"{name}.log"
        self.bootstrap_port: int | None = None
        self._port: int | None = None
        self.meeting_port: int | None = None
        self._url: str | None = None
        self._actor: ActorObject[HostedServer] | None = None
        self._starting: PendingCall[str] | None = None
        self._serving: PendingCall[int | None] | None = None
        self._end_reason = "it was never started"

    @property
    def role(self) -> Role:
        """The stages of a request that it runs."""
        return self.settings.role

    @property
    def key(self) -> str | None:
        """The key that it asks for; None = none."""
        return self.settings.key

    @property
    def port(self) -> int:
        """Its port on its machine, once it was checked or started."""
        assert self._port is not None, "its machine chooses a port when it is checked"
        return self._port

    @property
    def url(self) -> str:
        """Its address, once it was checked or started; of one that moves the last, until it is checked."""
        assert self._url is not None, "its machine chooses a port when it is checked"
        return self._url

    @property
    def running(self) -> bool:
        """Whether its process, or one of its children, runs, and its actor does; also one that hangs."""
        return self._serving is not None and not self._serving.is_done

    @property
    def left_s(self) -> float | None:
        """How long its machine is still there, where that is going away (seconds); None = it stays."""
        return self._place.session.draining.left_s(self._node) if self._place.may_move else None

    @property
    def actor_pid(self) -> int:
        """The process of its actor, on its machine.

        Raises:
            RemoteError: it has none now, or that has gone.
        """
        if self._actor is None:
            raise RemoteError(f"{self.name} has no actor now.", is_gone=True)
        return self._actor.pid

    @property
    def end_reason(self) -> str:
        """How it ended, for an error message."""
        if self._serving is not None and not self.running:
            try:
                self._end_reason = f"it ended (exit code {self._serving.result()})"
            except RemoteError as error:
                assert self._actor is not None, "a server that was started has an actor"
                self._end_reason = f"its actor, {self._actor.where}, {error}"
        return self._end_reason

    async def check(self) -> None:
        """Check its arguments on its machine, and choose its ports there.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: its actor did not start.
        """
        actor = await self._opened()
        opened = await self._reply(actor.call(HostedServer.check))
        self._port, self.bootstrap_port = opened.port, opened.bootstrap_port
        self.meeting_port = opened.meeting_port
        self._url = url_of(self.settings.host, self.port)
        if opened.problem:
            await self.stop()
            raise ConfigError(opened.problem)

    async def start(self) -> None:
        """Start or restart it, and wait until it is healthy. On interruption it is stopped.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: it ended, or was not healthy after first_wait_s, with the last lines of
                its log; or its actor has gone.
        """
        if self._serving is not None or self._starting is not None:
            await self.stop()
        if self._actor is None:
            await self.check()
        up = False
        try:
            actor = await self._opened()
            self._starting = actor.call(HostedServer.start)
            # Calls run in their order: this one begins when the server is up, or has not started.
            self._serving = actor.call(HostedServer.wait_ended)
            problem = await self._reply(self._starting)
            self._starting = None
            if problem:
                raise EngineUnavailableError(problem.replace(actor.identify().log, str(self.log)))
            up = True
        finally:
            if not up:
                await self.stop()

    def meet(self, first: RayServer) -> None:
        """Meet the other parts of its server where the first one does, which was checked."""
        part, where = self.settings.part, first.settings.part
        assert part is not None, "it is a part"
        assert where is not None, "so is the first one"
        met = part._replace(host=where.host, port=first.meeting_port)
        self.settings = replace(self.settings, part=met)

    def terminate(self) -> None:
        """Begin to end it, without waiting."""
        if self._actor is not None and self._serving is not None:
            self._actor.call_beside(HostedServer.terminate)

    async def stop(self) -> None:
        """End it and all its children, then its actor, and wait. Does nothing where it does not run."""
        deadline = time.monotonic() + _STOP_S
        while self.running and time.monotonic() < deadline:
            self.terminate()
            signalled = time.monotonic()
            while self.running and time.monotonic() - signalled < _SIGNAL_INTERVAL_S:
                await asyncio.sleep(_POLL_S)
        self._end_reason = self.end_reason
        actor, self._actor, self._starting, self._serving = self._actor, None, None, None
        if actor is not None:
            await asyncio.to_thread(actor.close)

    def log_tail(self) -> str:
        """The last lines of its log as it is here, with a heading."""
        return tail_of(self.log)

    async def _opened(self) -> ActorObject[HostedServer]:
        """Its actor, with the server in it."""
        if self._actor is None:
            actor = self._actor = ActorObject[HostedServer](
                self._place.session, self._place.group, self.allocation, self.log, name=self._listed
            )
            try:
                identity = await actor.identified()
            except RemoteError as error:
                await self.stop()
                raise EngineUnavailableError(f"the actor of {self.name} {error}.") from error
            if identity.node != self._node:
                self._node, self._port = identity.node, None
                self.settings = replace(self.settings, host=identity.host)
                if (part := self.settings.part) is not None and part.rank == 0:
                    self.settings = replace(self.settings, part=part._replace(host=identity.host))
            await self._reply(actor.create(HostedServer, self.settings, self.name, self._port, identity.log))
        return self._actor

    async def _reply(self, call: PendingCall[R]) -> R:
        """The reply to a call of its actor.

        Raises:
            EngineUnavailableError: the actor has gone, or raised an exception.
        """
        try:
            return await call.reply()
        except RemoteError as error:
            where = "" if self._actor is None else f", {self._actor.where},"
            raise EngineUnavailableError(f"{self.name}: its actor{where} {error}.") from error


class SpreadServer:
    """One SGLang server over several machines: a part on each, of which the first serves. See `Handle`.

    It has ended where one of its parts has, and each start is one of all parts.
    """

    bootstrap_port: int | None = None

    def __init__(self, parts: Sequence[RayServer]) -> None:
        self.parts = tuple(parts)
        self._first = self.parts[0]
        self.name, self.log = self._first.name, self._first.log
        self._is_checked = False

    @property
    def role(self) -> Role:
        """The stages of a request that it runs."""
        return self._first.role

    @property
    def key(self) -> str | None:
        """The key that it asks for; None = none."""
        return self._first.key

    @property
    def url(self) -> str:
        """The address of the part that serves, once it was checked or started."""
        return self._first.url

    @property
    def running(self) -> bool:
        """Whether all parts run."""
        return all(part.running for part in self.parts)

    @property
    def left_s(self) -> float | None:
        """How long all machines are still there, where one is going away (seconds); None = they stay."""
        return min((part.left_s for part in self.parts if part.left_s is not None), default=None)

    @property
    def end_reason(self) -> str:
        """How the first of the parts that do not run ended, for an error message."""
        ended = next((part for part in self.parts if not part.running), self._first)
        return ended.end_reason if ended is self._first else f"{ended.name}: {ended.end_reason}"

    async def check(self) -> None:
        """Check the arguments of each part on its machine, and where they meet.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: an actor did not start.
        """
        await self._first.check()
        others = self.parts[1:]
        for part in others:
            part.meet(self._first)
        await asyncio.gather(*(part.check() for part in others))
        self._is_checked = True

    async def start(self) -> None:
        """Start or restart all parts, and wait until each is healthy. On interruption they are stopped.

        Raises:
            ConfigError: the interpreter, or an argument, is invalid.
            EngineUnavailableError: a part ended, or was not healthy after first_wait_s.
        """
        if not self._is_checked:
            await self.stop()
            await self.check()
        self._is_checked = False
        starting = [asyncio.create_task(part.start()) for part in self.parts]
        up = False
        try:
            await asyncio.gather(*starting)
            up = True
        finally:
            if not up:
                for task in starting:
                    task.cancel()
                await asyncio.gather(*starting, return_exceptions=True)
                await self.stop()

    def terminate(self) -> None:
        """Begin to end it, without waiting."""
        for part in self.parts:
            part.terminate()

    async def stop(self) -> None:
        """End all parts, and wait."""
        self._is_checked = False
        self.terminate()
        await asyncio.gather(*(part.stop() for part in self.parts))

    def log_tail(self) -> str:
        """The last lines of the log of a part that does not run, with a heading."""
        return next((part for part in self.parts if not part.running), self._first).log_tail()
