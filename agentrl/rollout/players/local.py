"""Players on the driver's machine: child processes, each with a pipe."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import cast

from agentrl.errors import WorldBrokenError
from agentrl.processes.child import Child, ProcessFailure
from agentrl.rollout.players import messages
from agentrl.rollout.players.launcher import PlayerEvents, PlayerPlan

_LONGEST = 0x7FFFFFFF
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LocalPlayers:
    """Starts players as child processes. size: players that run at once (count).

    variables: of the environment of each, over those of this process, in order; left out, none.
    """

    size: int
    variables: Sequence[Mapping[str, str]] = ()

    def start(self, number: int, plan: PlayerPlan, log: Path, events: PlayerEvents) -> LocalPlayer:
        """Start a player; see `PlayerLauncher`."""
        variables = self.variables[number] if self.variables else _NONE
        return LocalPlayer(number, plan, log, events, variables)


class LocalPlayer:
    """A player that is a child process; see `PlayerProcess`."""

    machine_is_gone = False

    def __init__(
        self,
        number: int,
        plan: PlayerPlan,
        log: Path,
        events: PlayerEvents,
        variables: Mapping[str, str] = _NONE,
    ) -> None:
        self.log = log
        self._child = Child(plan.module, (), log, variables)
        self.name = f"player {number} (process {self._child.pid})"
        self._pipe = DriverPipe(self._child.pipe, events)
        self._pipe.send_plan(plan.plan)

    async def pid(self) -> int:
        """The process."""
        return self._child.pid

    def send(self, message: messages.ToPlayer) -> None:
        """Send a message; what the process does not read is kept here."""
        self._pipe.send(message)

    def close(self) -> None:
        """Close the pipe: the process cancels its groups, and ends."""
        self._pipe.close()
        self._child.pipe.close()

    async def end_reason(self) -> str:
        """How the process ended, and its last exception."""
        reason = await asyncio.to_thread(self._child.exit_description) or "closed its pipe"
        return f"{reason}: {self._pipe.failure.error}" if self._pipe.failure else reason

    async def kill(self) -> None:
        """Kill the process."""
        self._child.kill()


class DriverPipe:
    """Messages to a player, those of one turn of the event loop together, and those that it sends.

    Sending never blocks: what the player does not read is kept here. events: it has ended when it has closed
    its end; failure is then its last message.
    """

    def __init__(self, connection: Connection, events: PlayerEvents) -> None:
        self._connection, self._events = connection, events
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._outbox = messages.Outbox[messages.ToPlayer](self._write, events.failed)
        self._unsent = bytearray()
        self._is_open = True
        self.failure: ProcessFailure | None = None
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: messages.ToPlayer) -> None:
        """Send a message at the end of this turn of the event loop; a closed pipe drops it."""
        self._outbox.add(message)

    def send_plan(self, plan: bytes) -> None:
        """Send the first message."""
        self._write(plan)

    def close(self) -> None:
        """Read and send no more."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _write(self, data: bytes) -> None:
        if not self._is_open:
            return
        size = len(data)
        # As `Connection.send_bytes` does it.
        head = struct.pack("!i", size) if size <= _LONGEST else struct.pack("!iQ", -1, size)
        is_waiting = bool(self._unsent)
        self._unsent += head + data
        if not is_waiting:
            self._send_some()

    def _send_some(self) -> None:
        # A closed pipe shows when it is read.
        with suppress(BlockingIOError, OSError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        if self._unsent:
            self._loop.add_writer(self._socket.fileno(), self._send_some)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            while self._is_open and self._connection.poll():
                self._receive(messages.unpickled(self._connection.recv_bytes()))
        except WorldBrokenError as error:
            self._events.failed(error)
        except (EOFError, OSError):
            if self._is_open:
                self.close()
                self._events.ended()

    def _receive(self, message: object) -> None:
        if isinstance(message, ProcessFailure):
            self.failure = message
            return
        for each in cast(Sequence[messages.FromPlayer], message):
            self._events.received(each)
