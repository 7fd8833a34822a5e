"""Requests in flight to servers, where their number follows the servers' queues and caches.

    a completion    raises the limit by one, where it was reached, no request waited in a server and no cache
                    was nearly full; once the limit has been lowered, by one for as many completions
    a queue         in two reports in a row lowers the limit to what the servers compute
    a full cache    lowers the limit in proportion, and interrupts the youngest requests above it: they go on
                    with the tokens that they have, before any younger request, when others have ended

The oldest request is never interrupted, and the limit is never below 1: so every request ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from typing import NamedTuple, Self

from agentrl.engine.sglang.request import PendingRequest, PendingRequests
from agentrl.engine.sglang.wire import RankLoad
from agentrl.errors import EngineError
from agentrl.runtime.clocks import clocks_stopped

_FIRST_LIMIT = 16
# Of a cache, in use by running requests. SGLang takes requests back by itself where nothing is left.
_FULL, _NEARLY_FULL = 0.95, 0.8
_LOAD_EVERY_S, _LOAD_AT_LEAST_EVERY_S = 0.5, 2.0


class Load(NamedTuple):
    """The load of servers.

    num_waiting: requests that no server computes yet (count). cache_usage: the share of a cache that running
    requests use, in the server where it is the greatest.
    """

    num_waiting: int
    cache_usage: float

    @classmethod
    def of(cls, ranks: Sequence[RankLoad], num_clients: int) -> Self:
        """One client's part of the queues of all servers, and the fullest cache."""
        waiting = sum(rank.num_waiting_reqs for rank in ranks)
        return cls(-(-waiting // num_clients), max((rank.token_usage for rank in ranks), default=0.0))


class AdaptiveLimit:
    """The limit on requests in flight, from 1 to a ceiling (counts)."""

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._limit = float(min(_FIRST_LIMIT, ceiling))
        self._was_lowered = False
        self._load = Load(0, 0.0)
        self._num_queued = 0

    @property
    def value(self) -> int:
        """The limit (count)."""
        return int(self._limit)

    @property
    def is_cache_full(self) -> bool:
        """Whether a cache was full in the last report."""
        return self._load.cache_usage >= _FULL

    def complete(self, num_in_flight: int) -> None:
        """Record the end of a request. num_in_flight: with that one (count)."""
        if num_in_flight < self.value or self._num_queued or self._load.cache_usage > _NEARLY_FULL:
            return
        raised = self._limit + (1.0 / self._limit if self._was_lowered else 1.0)
        self._limit = min(float(self._ceiling), raised)

    def report(self, load: Load, num_in_flight: int) -> None:
        """Record the servers' load. num_in_flight: at that time (count)."""
        # A request may wait for a moment: until the server's current step has ended.
        self._num_queued = min(load.num_waiting, self._load.num_waiting)
        self._load = load
        lowered = float(num_in_flight - self._num_queued) if self._num_queued else self._limit
        if self.is_cache_full:
            lowered = min(lowered, num_in_flight * _NEARLY_FULL / load.cache_usage)
        if lowered < self._limit:
            self._limit = max(1.0, lowered)
            self._was_lowered = True


class Admission:
    """Admits requests up to a limit, the oldest of those that wait first.

    consumes: requests, loads. waits for: the end of a request in flight. unblocked by: `leave`.
    """

    def __init__(self, limit: AdaptiveLimit) -> None:
        self.limit = limit
        self._in_flight: dict[int, PendingRequest] = {}
        self._waiting: list[tuple[int, asyncio.Future[bool], PendingRequest]] = []

    async def enter(self, pending: PendingRequest) -> bool:
        """Wait for a place, which `leave` gives back. False: its ticket was resolved to False meanwhile."""
        ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        pending.ticket = ticket
        heappush(self._waiting, (pending.number, ticket, pending))
        self._admit()
        try:
            with clocks_stopped():
                return await ticket
        except asyncio.CancelledError:
            # Admitted and cancelled at the same time.
            if self._in_flight.get(pending.number) is pending:
                self.leave(pending)
            raise

    def leave(self, pending: PendingRequest) -> None:
        """Give the place of a request back, whether it has ended or goes on later."""
        if pending.draft.ended:
            self.limit.complete(len(self._in_flight))
        del self._in_flight[pending.number]
        self._admit()

    def report(self, load: Load) -> list[PendingRequest]:
        """Record the servers' load; returns the requests to be interrupted, marked as such."""
        self.limit.report(load, len(self._in_flight))
        if not self.limit.is_cache_full:
            return []
        youngest = [self._in_flight[number] for number in sorted(self._in_flight)[self.limit.value :]]
        for pending in youngest:
            pending.interrupted = True
        return youngest

    def _admit(self) -> None:
        while self._waiting and len(self._in_flight) < self.limit.value:
            number, ticket, pending = heappop(self._waiting)
            if not ticket.done():
                ticket.set_result(True)
                self._in_flight[number] = pending


class LoadPoller:
    """While there are requests: reports the servers' load, and interrupts the youngest for a full cache.

    loads: asks all servers. num_clients: see `SGLangPolicy`.
    """

    def __init__(
        self,
        admission: Admission,
        requests: PendingRequests,
        loads: Callable[[], Awaitable[Sequence[RankLoad]]],
        num_clients: int,
    ) -> None:
        self._admission, self._requests = admission, requests
        self._loads, self._num_clients = loads, num_clients
        self._polling: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Go on, if it has stopped, until no request is left."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])

    async def _poll(self) -> None:
        while self._requests:
            # The requests of a server that is down fail by themselves.
            with suppress(EngineError):
                load = Load.of(await self._loads(), self._num_clients)
                await self._requests.interrupt(self._admission.report(load))
            await asyncio.sleep(min(_LOAD_EVERY_S * self._num_clients, _LOAD_AT_LEAST_EVERY_S))
