"""Repeats of one piece of work, as many as there is time for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from agentrl.types import JSON
from benchmarks.compare import Figures, figures_of

MOST = 5
LEAST = 2


class Timed(NamedTuple):
    """first_s: of the first call, which warms up. seconds: of the others."""

    first_s: float
    seconds: Figures

    @property
    def median(self) -> float:
        """The median of the repeats (seconds)."""
        return self.seconds.median

    def figures(self) -> dict[str, JSON]:
        """As JSON."""
        return {"first_s": self.first_s, "seconds": self.seconds._asdict()}

    def __str__(self) -> str:
        return f"median of {len(self.seconds.repeats)}, spread {self.seconds.spread:.0%}"


async def repeated(
    work: Callable[[], Awaitable[object]], left_s: float, *, most: int = MOST, first_s: float | None = None
) -> Timed:
    """The seconds of `work`, up to `most` times while `left_s` lasts, and at least twice.

    first_s: of a call that has warmed it up; None = it runs once more, for that.
    """
    ends = time.perf_counter() + left_s
    if first_s is None:
        first_s = await seconds_of(work)
    seconds: list[float] = []
    while len(seconds) < LEAST or (
        len(seconds) < most and time.perf_counter() + sum(seconds) / len(seconds) < ends
    ):
        seconds.append(await seconds_of(work))
    return Timed(first_s, figures_of(seconds))


async def seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    """The seconds of one call."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started
