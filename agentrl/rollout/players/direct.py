"""Requests that a player sends to the servers itself, and the driver's hold on them.

    driver                                     player
    DirectClient    Hold, Release(salt) ->     DirectRequests: its policy sends nothing in between
                    <- Held                    once its running requests have ended

A player begins held. So it sends nothing before the driver has given it the salt of the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentrl.rollout.players import messages
from agentrl.types.seams import Policy

HOLD_S = 60.0
"""How long a player may take to end its requests (seconds)."""


class HeldPolicy(Policy, Protocol):
    """A policy whose requests can be held. counts, salt: see `PolicyClient`."""

    salt: str | None

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of its unusual requests so far, by name."""

    def held(
        self, abort_all: Callable[[], Awaitable[None]] | None = None
    ) -> AbstractAsyncContextManager[float]:
        """Hold all requests during the block; the time at which the first running one had ended.

        abort_all: ends all of them, in fewer calls than one for each.
        """


class DirectClient:
    """A player's requests, for the engine of the driver; see `PolicyClient`.

    send: sends it a message. on_overdue: called where it has not answered a hold in `HOLD_S`; it has to end.
    """

    def __init__(self, send: Callable[[messages.ToPlayer], None], on_overdue: Callable[[], None]) -> None:
        self._send, self._on_overdue = send, on_overdue
        # Holds may overlap: each has an answer of its own.
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[float]] = {}
        self._has_ended = False
        self.counts: Mapping[str, int] = {}

    async def hold(self) -> float:
        """Have the player send no request, and wait until it has none; see `PolicyClient.hold`."""
        if self._has_ended:
            return time.perf_counter()
        number = next(self._numbers)
        held: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._pending[number] = held
        self._send(messages.Hold(number))
        try:
            done, _ = await asyncio.wait([held], timeout=HOLD_S)
            if not done:
                self._on_overdue()
            return await held
        finally:
            del self._pending[number]

    def release(self, salt: str | None) -> None:
        """Have it send requests again."""
        self._send(messages.Release(salt))

    def receive(self, message: messages.RequestsHeld) -> None:
        """The player has no request in flight."""
        held = self._pending.get(message.number)
        if held is not None and not held.done():
            held.set_result(time.perf_counter() - message.ago_s)

    def end(self) -> None:
        """The player has ended, and its connections with it."""
        self._has_ended = True
        for held in self._pending.values():
            if not held.done():
                held.set_result(time.perf_counter())


class DirectRequests:
    """The policy of this player, which the driver holds. It begins held. send: sends the driver a message."""

    def __init__(self, policy: HeldPolicy, send: Callable[[messages.FromPlayer], None]) -> None:
        self._policy, self._send = policy, send
        self._released = asyncio.Event()
        self._holds: set[asyncio.Task[None]] = set()
        self.hold(messages.Hold(0))

    @property
    def counts(self) -> Mapping[str, int]:
        """The policy's."""
        return dict(self._policy.counts)

    def hold(self, message: messages.Hold) -> None:
        """Hold all requests of tasks that begin after this call, and answer once none runs."""
        if self._released.is_set():
            self._released = asyncio.Event()
        hold = asyncio.get_running_loop().create_task(self._hold(message.number, self._released))
        self._holds.add(hold)
        hold.add_done_callback(self._holds.discard)

    def release(self, message: messages.Release) -> None:
        """Send requests again, with this salt."""
        self._policy.salt = message.salt
        self._released.set()

    async def close(self) -> None:
        """End the hold."""
        for hold in (holds := list(self._holds)):
            hold.cancel()
        await asyncio.gather(*holds, return_exceptions=True)

    async def _hold(self, number: int, released: asyncio.Event) -> None:
        async with self._policy.held(_aborted_by_the_driver) as ended_at:
            self._send(messages.RequestsHeld(number, time.perf_counter() - ended_at))
            await released.wait()


async def _aborted_by_the_driver() -> None:
    """Do nothing: the driver ends the requests of all clients, in one call of each server."""
