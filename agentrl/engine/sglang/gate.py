"""A bound on requests at a time, whose waiting can be ended."""

from __future__ import annotations

import asyncio
from collections import deque


class Gate:
    """Lets `size` in at a time, first come, first served."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: deque[asyncio.Future[bool]] = deque()

    async def enter(self, ticket: asyncio.Future[bool]) -> bool:
        """Wait for room; False where the ticket was resolved to False meanwhile. Who is in must leave()."""
        if ticket.done():
            return ticket.result()
        if self._free and not self._waiting:
            self._free -= 1
            return True
        self._waiting.append(ticket)
        try:
            return await ticket
        except asyncio.CancelledError:
            # Let in and cancelled in the same moment: the room goes to the next one.
            if ticket.done() and not ticket.cancelled() and ticket.result():
                self.leave()
            raise

    def leave(self) -> None:
        """Give the room to the next one that still waits."""
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_result(True)
                return
        self._free += 1
