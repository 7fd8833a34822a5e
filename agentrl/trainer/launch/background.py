"""A thread for calls that block, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


class Background:
    """Runs one call at a time, in the order in which they are made.

    A call that has begun goes on to its end. Where its caller is cancelled meanwhile, it gets what the call
    returned, and is cancelled at its next await: what a step has done is known. Cancelled a second time, it
    calls `abandon`, which has to make the call end, and waits no longer.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon = abandon
        self._thread = ThreadPoolExecutor(1, "agentrl-ranks")

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """What the function returns; it raises what that raises."""
        call = asyncio.wrap_future(self._thread.submit(function, *args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise
        await self._ended(call)
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        task.uncancel()
        task.cancel()
        return call.result()

    async def _ended(self, call: asyncio.Future[R]) -> None:
        ended = False
        try:
            await asyncio.wait([call])
            ended = True
        finally:
            if not ended:
                self._abandon()
                # Nobody will ask what came of it.
                call.add_done_callback(lambda done: done.cancelled() or done.exception())
