"""A bound on how many callers may be inside something at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class _LoopState:
    """The free places of one event loop, and the tickets of those that wait for one."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.waiting: deque[asyncio.Future[bool]] = deque()


class Gate:
    """Lets at most `limit` callers of one event loop in, first come, first served. None = no limit.

    Raises:
        ValueError: the limit is below 1.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {limit}; None means no limit")
        self._limit = limit
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it during the block."""
        await self.enter(asyncio.get_running_loop().create_future())
        try:
            yield
        finally:
            self.leave()

    async def enter(self, ticket: asyncio.Future[bool]) -> bool:
        """Wait for a place, which `leave` gives back. False: the ticket was resolved to False meanwhile."""
        if ticket.done():
            return ticket.result()
        if self._limit is None:
            return True
        places = self._places(self._limit)
        if places.free and not places.waiting:
            places.free -= 1
            return True
        places.waiting.append(ticket)
        try:
            return await ticket
        except asyncio.CancelledError:
            # Let in and cancelled in the same moment: the place goes to the next one.
            if ticket.done() and not ticket.cancelled() and ticket.result():
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place to the next one that still waits."""
        if self._limit is None:
            return
        places = self._places(self._limit)
        while places.waiting:
            ticket = places.waiting.popleft()
            if not ticket.done():
                ticket.set_result(True)
                return
        places.free += 1

    def _places(self, limit: int) -> _LoopState:
        loop = asyncio.get_running_loop()
        places = self._by_loop.get(loop)
        if places is None:
            places = self._by_loop[loop] = _LoopState(limit)
        return places
