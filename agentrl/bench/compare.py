"""Rates side by side in one run: interleaved repeats, medians, spreads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from agentrl.types import JSON

Side = Callable[[], Awaitable[None]]


class Rates(NamedTuple):
    """medians: by side, a second. told: every repeat, the median, the spread (max - min, over the median)."""

    medians: Mapping[str, float]
    told: dict[str, JSON]


async def rates(sides: Mapping[str, Side], amount: int, unit: str, *, repeats: int) -> Rates:
    """How often a second each side does what it does `amount` times in one go.

    Each side runs once to warm up; then all take turns, in an order that turns around every time.
    """
    for run in sides.values():
        await run()
    found: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            started = time.perf_counter()
            await sides[side]()
            found[side].append(amount / (time.perf_counter() - started))
    medians = {side: statistics.median(of) for side, of in found.items()}
    told: dict[str, JSON] = {
        side: {unit: [*of], "median": medians[side], "spread": (max(of) - min(of)) / medians[side]}
        for side, of in found.items()
    }
    return Rates(medians, told)
