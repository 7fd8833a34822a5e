"""How long the event loop was kept from its work."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

PERIOD_S = 0.01


class LagMeter:
    """Wakes up every 10 ms while its block runs, and keeps how late it woke at worst.

    A loop that is late answers nobody meanwhile: replies lie, deadlines pass.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._watching = asyncio.create_task(self._watch(), name="agentrl-lag-meter")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def take(self) -> float:
        """The longest lag since the last call (seconds)."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    async def _watch(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(PERIOD_S)
            self._longest_s = max(self._longest_s, time.perf_counter() - asked - PERIOD_S)
