"""At most so many calls of a tool at a time, over all episodes that play at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class Gate:
    """Lets at most `limit` callers of one event loop in; the others wait in their order. None = no limit.

    Raises:
        ValueError: the limit is below 1.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {limit}; None means no limit")
        self._limit = limit
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Wait until there is room, and hold it."""
        if self._limit is None:
            yield
            return
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            self._by_loop[loop] = asyncio.Semaphore(self._limit)
        async with self._by_loop[loop]:
            yield
