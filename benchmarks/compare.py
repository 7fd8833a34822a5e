"""Comparison of sides in one run: interleaved repeats, medians, spreads."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from agentrl.types import JSON

Side = Callable[[], Awaitable[None]]
_Run = TypeVar("_Run")


class Duration(NamedTuple):
    """The duration of one run of a side: wall time, and CPU time of this process (seconds)."""

    wall_s: float
    cpu_s: float


class Figures(NamedTuple):
    """The figures of a side: the median, the spread (max - min, over the median) and every repeat."""

    median: float
    spread: float
    repeats: list[JSON]


def figures_of(values: Sequence[float]) -> Figures:
    """The figures of a side."""
    median = statistics.median(values)
    return Figures(median, (max(values) - min(values)) / median, [*values])


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share q of all values does not exceed."""
    return sorted(values)[math.ceil(q * len(values)) - 1]


class Compared(NamedTuple):
    """medians: by side. figures: by side, repeats, median and spread (max - min, over the median)."""

    medians: Mapping[str, float]
    figures: dict[str, JSON]


async def interleaved(
    sides: Mapping[str, Callable[[], Awaitable[_Run]]], *, repeats: int, warm_up: bool = True
) -> dict[str, list[_Run]]:
    """The result of each side in every repeat.

    Each side runs once to warm up, unless its runs do so themselves (`warm_up` off); then all take turns, in
    an order that is reversed in every repeat. The garbage of a side is collected before the next one's run
    begins.
    """
    for run in sides.values() if warm_up else ():
        await run()
    results: dict[str, list[_Run]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            gc.collect()
            results[side].append(await sides[side]())
    return results


async def timed(sides: Mapping[str, Side], *, repeats: int) -> dict[str, list[Duration]]:
    """The durations of each side in every repeat; see `interleaved`."""
    return await interleaved({side: partial(_timed, run) for side, run in sides.items()}, repeats=repeats)


async def _timed(run: Side) -> Duration:
    wall, cpu = time.perf_counter(), time.process_time()
    await run()
    return Duration(time.perf_counter() - wall, time.process_time() - cpu)


async def rates(sides: Mapping[str, Side], amount: int, unit: str, *, repeats: int) -> Compared:
    """The rates of sides that process `amount` units in each run; see `timed`."""
    return rates_of(await timed(sides, repeats=repeats), amount, unit)


def rates_of(spent: Mapping[str, list[Duration]], amount: float, unit: str) -> Compared:
    """The rates of sides that processed `amount` units in each run. unit: the key of the repeats."""
    return compared({side: [amount / run.wall_s for run in runs] for side, runs in spent.items()}, unit)


def seconds_of(spent: Mapping[str, list[Duration]]) -> Compared:
    """The wall times of sides (seconds)."""
    return compared({side: [run.wall_s for run in runs] for side, runs in spent.items()}, "seconds")


def compared(values: Mapping[str, Sequence[float]], unit: str) -> Compared:
    """The figures of sides. values: of the repeats, by side. unit: the key of the repeats."""
    figures = {side: figures_of(repeats) for side, repeats in values.items()}
    return Compared(
        {side: one.median for side, one in figures.items()},
        {
            side: {unit: one.repeats, "median": one.median, "spread": one.spread}
            for side, one in figures.items()
        },
    )
