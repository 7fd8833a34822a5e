"""A limit on the number of concurrent callers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from agentrl.runtime.activity import WAIT
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.stage import stage


class _LoopState:
    """The number of free slots of one event loop, and the futures of the waiting callers."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.waiting: deque[asyncio.Future[bool]] = deque()


class Gate:
    """Admits at most `limit` concurrent callers of each event loop, in FIFO order.

    limit: how many (count); None = no limit.

    Waiting stops the clocks of the caller's stages: callers that hold slots have deadlines of their own.

    Raises:
        ValueError: the limit is below 1.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {limit}; None means no limit")
        self._limit = limit
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()

    @asynccontextmanager
    async def admitted(self, what: str = "") -> AsyncIterator[None]:
        """Wait for a slot, and hold it during the block. what: the name of what has slots, for the status."""
        await self.enter(asyncio.get_running_loop().create_future(), what)
        try:
            yield
        finally:
            self.leave()

    async def enter(self, ticket: asyncio.Future[bool], what: str = "") -> bool:
        """Wait for a slot, which `leave` releases. False: the ticket was resolved to False meanwhile."""
        if ticket.done():
            return ticket.result()
        if self._limit is None:
            return True
        slots = self._slots(self._limit)
        if slots.free and not slots.waiting:
            slots.free -= 1
            return True
        slots.waiting.append(ticket)
        try:
            with clocks_stopped():
                async with stage(WAIT, None, what):
                    return await ticket
        except asyncio.CancelledError:
            # Admitted and cancelled at the same time: the slot goes to the next waiting caller.
            if ticket.done() and not ticket.cancelled() and ticket.result():
                self.leave()
            raise

    def leave(self) -> None:
        """Release a slot to the next waiting caller."""
        if self._limit is None:
            return
        slots = self._slots(self._limit)
        while slots.waiting:
            ticket = slots.waiting.popleft()
            if not ticket.done():
                ticket.set_result(True)
                return
        slots.free += 1

    def _slots(self, limit: int) -> _LoopState:
        loop = asyncio.get_running_loop()
        slots = self._by_loop.get(loop)
        if slots is None:
            slots = self._by_loop[loop] = _LoopState(limit)
        return slots
