"""The driver's end of a player's pipe, and the requests of the player to the engine."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias, cast

from agentrl.activity import requesting
from agentrl.clocks import relayed_to
from agentrl.errors import AgentRLError, EngineError, summary_of
from agentrl.processes import ProcessFailure
from agentrl.protocols import Policy
from agentrl.rollout.players import messages
from agentrl.types import Completion

_LONGEST = 0x7FFFFFFF

Send: TypeAlias = Callable[[messages.ToPlayer], None]


class DriverPipe:
    """Messages to a player, those of one turn of the event loop together, and those that it sends.

    Sending never blocks: what the player does not read is kept here. received: called with each message.
    closed: called once, when the player has closed its end; failure is then its last message.
    """

    def __init__(
        self,
        connection: Connection,
        received: Callable[[messages.FromPlayer], None],
        closed: Callable[[], None],
    ) -> None:
        self._connection, self._received, self._closed = connection, received, closed
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._outbox: list[messages.ToPlayer] = []
        self._unsent = bytearray()
        self._is_open = True
        self.failure: ProcessFailure | None = None
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, message: messages.ToPlayer) -> None:
        """Send a message at the end of this turn of the event loop; a closed pipe drops it."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

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

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._write(pickle.dumps(outbox, pickle.HIGHEST_PROTOCOL))

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
                message = self._connection.recv()
                if isinstance(message, ProcessFailure):
                    self.failure = message
                    continue
                for each in cast(Sequence[messages.FromPlayer], message):
                    self._received(each)
        except (EOFError, OSError):
            if self._is_open:
                self.close()
                self._closed()


class _RemoteClocks:
    """The clocks around a request in a player, which stop while the driver's request waits."""

    def __init__(self, number: int, send: Send) -> None:
        self._number, self._send, self._num_stops = number, send, 0

    def stop(self) -> None:
        """Stop them, until as many `resume` calls."""
        self._num_stops += 1
        if self._num_stops == 1:
            self._send(messages.ClocksStopped(self._number, is_stopped=True))

    def resume(self) -> None:
        """Undo one `stop`."""
        self._num_stops -= 1
        if not self._num_stops:
            self._send(messages.ClocksStopped(self._number, is_stopped=False))


class Requests:
    """The requests of one player to the engine, as tasks of the driver."""

    def __init__(self, engine: Policy, send: Send) -> None:
        self._engine, self._send = engine, send
        self._tasks: dict[int, asyncio.Task[Completion | None]] = {}
        self._sessions: set[str] = set()

    def handle(self, message: messages.Generate | messages.CloseSession | messages.CancelRequest) -> None:
        """Start a request, or cancel it."""
        match message:
            case messages.Generate():
                self._sessions.add(message.session)
                self._start(message.number, self._generate(message))
            case messages.CloseSession():
                self._sessions.discard(message.session)
                self._start(message.number, self._close_session(message.session))
            case messages.CancelRequest():
                if (task := self._tasks.get(message.number)) is not None:
                    task.cancel()

    async def close(self) -> None:
        """Cancel all requests and free all sessions: the player has ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        sessions, self._sessions = self._sessions, set()
        await asyncio.gather(*map(self._engine.close_session, sessions), return_exceptions=True)

    def _start(self, number: int, work: Coroutine[None, None, Completion | None]) -> None:
        task = self._tasks[number] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(partial(self._answer, number))

    async def _generate(self, message: messages.Generate) -> Completion:
        with relayed_to(_RemoteClocks(message.number, self._send)), requesting():
            return await self._engine.generate(message.prompt_ids, message.sampling, session=message.session)

    async def _close_session(self, session: str) -> None:
        await self._engine.close_session(session)

    def _answer(self, number: int, task: asyncio.Task[Completion | None]) -> None:
        del self._tasks[number]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send(messages.Answer(number, task.result()))
        elif isinstance(error, AgentRLError):
            self._send(messages.Answer(number, error=error))
        else:
            self._send(messages.Answer(number, error=EngineError(summary_of(error))))
