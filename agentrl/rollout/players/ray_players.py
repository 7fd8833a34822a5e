"""Players on the machines of a Ray cluster: the driver's side. An actor relays the messages of each.

consumes: messages to a player. waits for: those of the player, one call of the actor after another; the news
that its machine is going away. unblocked by: these, or the end of the player, of its actor or of its machine.
on shutdown: the player reads the end of its pipe, cleans up and ends; then its actor is ended. Ray ends the
actor when this process is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentrl.errors import RemoteError, WorldBrokenError
from agentrl.processes.child import Child, ProcessFailure
from agentrl.processes.placement import Allocation
from agentrl.processes.ray.actors import ActorObject, emptied
from agentrl.processes.ray.draining import Draining
from agentrl.processes.ray.session import RaySession
from agentrl.processes.remote import completed
from agentrl.rollout.players import messages
from agentrl.rollout.players.launcher import PlayerEvents, PlayerPlan

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_SECRET = "RAY_AUTH_TOKEN"
_END_S = 8.0
_KILL_S = 2.0


@dataclass(frozen=True, slots=True)
class RayPlayers:
    """Starts each player in a bundle of its own. Ray moves it where its machine is gone, if one has room."""

    session: RaySession
    group: PlacementGroup
    allocations: Sequence[Allocation]

    @property
    def size(self) -> int:
        """Players that run at once (count)."""
        return len(self.allocations)

    def start(self, number: int, plan: PlayerPlan, log: Path, events: PlayerEvents) -> RayPlayer:
        """Start a player; see `PlayerLauncher`."""
        allocation = self.allocations[number]
        actor = ActorObject[Relay](self.session, self.group, allocation, emptied(log.absolute()))
        return RayPlayer(number, plan, actor, events, self.session.draining)


class RayPlayer:
    """A player whose messages an actor relays; see `PlayerProcess`."""

    def __init__(
        self,
        number: int,
        plan: PlayerPlan,
        actor: ActorObject[Relay],
        events: PlayerEvents,
        draining: Draining,
    ) -> None:
        self.log, self._draining = actor.log, draining
        self._number, self._actor, self._events = number, actor, events
        self._outbox = messages.Outbox[messages.ToPlayer](self._send_all, events.failed)
        self._is_closing = False
        self._reason, self._failure = "sent a message that failed", ""
        self._created = actor.create(Relay, plan.module)
        actor.call(Relay.send, plan.plan)
        self._watching: asyncio.Task[None] | None = None
        self._following = asyncio.create_task(self._follow())

    @property
    def name(self) -> str:
        """The player, its actor's process and its machine."""
        return f"player {self._number} ({self._actor.where})"

    @property
    def machine_is_gone(self) -> bool:
        """Whether its machine did not answer when the actor had gone."""
        return self._actor.machine_is_gone

    def send(self, message: messages.ToPlayer) -> None:
        """Send a message; what the actor does not take is kept by Ray."""
        self._outbox.add(message)

    def close(self) -> None:
        """Have the player cancel its groups and end."""
        self._is_closing = True
        self._end_watch()
        if self._created.is_done:
            self._actor.call_beside(Relay.close)

    async def end_reason(self) -> str:
        """How the player, its actor or its machine ended."""
        await asyncio.wait([self._following], timeout=_END_S if self._created.is_done else 0.0)
        return self._reason + self._failure

    async def kill(self) -> None:
        """Kill the player and its actor, and copy the rest of its log."""
        self._is_closing = True
        self._end_watch()
        self._following.cancel()
        await asyncio.to_thread(self._kill)

    async def pid(self) -> int:
        """The player's process on its machine.

        Raises:
            RemoteError: it has gone.
        """
        await self._created.reply()
        return await self._actor.call_beside(Relay.pid).reply()

    def _kill(self) -> None:
        if self._created.is_done and not self.machine_is_gone:
            completed([self._actor.call_beside(Relay.end)], _KILL_S)
        self._actor.close()

    def _send_all(self, data: bytes) -> None:
        self._actor.call(Relay.send, data)

    async def _follow(self) -> None:
        """Pass on what the player sends, until it ends."""
        try:
            node = (await self._actor.identified()).node
            self._watching = asyncio.create_task(self._watch(node))
            await self._created.reply()
            while received := await self._actor.call_beside(Relay.receive).reply():
                for data in received:
                    self._receive(messages.unpickled(data))
            exit_description = await self._actor.call_beside(Relay.exit_description).reply()
            self._reason = str(exit_description or "closed its pipe")
        except RemoteError as error:
            self._reason = str(error)
        except WorldBrokenError as error:
            self._events.failed(error)
        finally:
            self._end_watch()
            if not self._is_closing:
                self._events.ended()

    async def _watch(self, node: str) -> None:
        self._events.leaving(await self._draining.of(node))

    def _end_watch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _receive(self, message: object) -> None:
        if isinstance(message, ProcessFailure):
            self._failure = f": {message.error}"
            return
        for each in cast(Sequence[messages.FromPlayer], message):
            if not self._is_closing:
                self._events.received(each)


class Relay:
    """A player in the process of an actor, on its machine: the object of the actor.

    It starts `python -m MODULE FD` as a child, whose output is the actor's, and passes messages on as bytes:
    nothing is read here. The child ends with its actor.
    Environments are not in the actor itself, which would save 71 of 270 MB: a process of Ray has Ray's token
    among its variables, and two dozen threads, beside which no environment can fork.
    """

    def __init__(self, module: str) -> None:
        # Ray has read it, and no environment needs it.
        os.environ.pop(_SECRET, None)
        self._child = Child(module, (), None)
        self._socket = socket.socket(fileno=os.dup(self._child.pipe.fileno()))

    def pid(self) -> int:
        """The child's process on this machine."""
        return self._child.pid

    def send(self, data: bytes) -> None:
        """Send the next message to the child, unless it has ended."""
        with suppress(OSError):
            self._child.pipe.send_bytes(data)

    def receive(self) -> Sequence[bytes]:
        """What the child has sent since the last call, after a wait for something; () = it has ended."""
        received: list[bytes] = []
        with suppress(EOFError, OSError):
            received.append(self._child.pipe.recv_bytes())
            while self._child.pipe.poll():
                received.append(self._child.pipe.recv_bytes())
        return received

    def close(self) -> None:
        """Have the child read the end of its pipe."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kill the child: one that stands still does not read that its pipe has ended."""
        self._child.end()

    def exit_description(self) -> str | None:
        """How the child ended; see `Child.exit_description`."""
        return self._child.exit_description()
