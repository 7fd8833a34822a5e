"""Rates side by side in one run: interleaved repeats, medians, spreads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from agentrl.types import JSON

Side = Callable[[], Awaitable[None]]


class Spent(NamedTuple):
    """What one run of a side took: time on the wall, and CPU time of this process (seconds)."""

    wall_s: float
    cpu_s: float


class Rates(NamedTuple):
    """medians: by side, a second. told: every repeat, the median, the spread (max - min, over the median)."""

    medians: Mapping[str, float]
    told: dict[str, JSON]


async def timed(sides: Mapping[str, Side], *, repeats: int) -> dict[str, list[Spent]]:
    """What each side takes, in every repeat.

    Each side runs once to warm up; then all take turns, in an order that turns around every time.
    """
    for run in sides.values():
        await run()
    found: dict[str, list[Spent]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            wall, cpu = time.perf_counter(), time.process_time()
            await sides[side]()
            found[side].append(Spent(time.perf_counter() - wall, time.process_time() - cpu))
    return found


async def rates(sides: Mapping[str, Side], amount: int, unit: str, *, repeats: int) -> Rates:
    """How often a second each side does what it does `amount` times in one go; see `timed`."""
    return rates_of(await timed(sides, repeats=repeats), amount, unit)


def rates_of(spent: Mapping[str, list[Spent]], amount: float, unit: str) -> Rates:
    """The rates of sides that did something `amount` times in each of their runs."""
    found = {side: [amount / one.wall_s for one in of] for side, of in spent.items()}
    medians = {side: statistics.median(of) for side, of in found.items()}
    told: dict[str, JSON] = {
        side: {unit: [*of], "median": medians[side], "spread": (max(of) - min(of)) / medians[side]}
        for side, of in found.items()
    }
    return Rates(medians, told)
