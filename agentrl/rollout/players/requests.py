"""The requests of a player to the engine, as tasks of the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeAlias

from agentrl.errors import AgentRLError, EngineError
from agentrl.rollout.players import messages
from agentrl.runtime.activity import requesting
from agentrl.runtime.clocks import relayed_to
from agentrl.runtime.stage import summary_of
from agentrl.types import Completion
from agentrl.types.seams import Policy

Send: TypeAlias = Callable[[messages.ToPlayer], None]


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

    def handle(self, message: messages.EngineCall) -> None:
        """Start a request, or cancel it."""
        match message:
            case messages.EngineRequest():
                self._sessions.add(message.session)
                self._start(message.number, self._generate(message))
            case messages.EndSession():
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

    async def _generate(self, message: messages.EngineRequest) -> Completion:
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
            self._send(messages.EngineAnswer(number, task.result()))
        elif isinstance(error, AgentRLError):
            self._send(messages.EngineAnswer(number, error=error))
        else:
            self._send(messages.EngineAnswer(number, error=EngineError(summary_of(error))))
