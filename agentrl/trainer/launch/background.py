"""A thread for blocking calls, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

R = TypeVar("R")


class Background:
    """Runs one call at a time, in the order in which they are made.

    A call that has begun runs to its end. A caller that is cancelled meanwhile still gets the result, and is
    cancelled at its next await: the result of a step is never lost. A caller that is cancelled a second time
    calls `abandon`, which has to make the call end, and waits no longer.
    """

    def __init__(self, abandon: Callable[[], None]) -> None:
        self._abandon = abandon
        self._thread = ThreadPoolExecutor(1, "agentrl-ranks")

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Call the function in the thread; returns its result, or raises its exception."""
        # The call belongs to the run of its caller.
        call = asyncio.wrap_future(self._thread.submit(copy_context().run, function, *args))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if call.cancelled():
                raise
        await self._wait_until_done(call)
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        task.uncancel()
        task.cancel()
        return call.result()

    async def _wait_until_done(self, call: asyncio.Future[R]) -> None:
        is_done = False
        try:
            await asyncio.wait([call])
            is_done = True
        finally:
            if not is_done:
                self._abandon()
                # No caller reads the result; asyncio would log an exception that nothing retrieves.
                call.add_done_callback(lambda done: done.cancelled() or done.exception())
