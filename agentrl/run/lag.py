"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

PERIOD_S = 0.01


class LagMeter:
    """Sleeps for 10 ms again and again while its block runs, and records the longest delay of a wake-up.

    During a delay the loop handles no replies and no deadlines.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._task = asyncio.create_task(self._watch(), name="agentrl-lag-meter")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def take(self) -> float:
        """The longest lag since the last call (seconds)."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    async def _watch(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(PERIOD_S)
            self._longest_s = max(self._longest_s, time.perf_counter() - started - PERIOD_S)
