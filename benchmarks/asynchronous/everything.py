"""`python -m benchmarks async`: its parts, run in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import get_args

from agentrl.types import JSON
from benchmarks.asynchronous.comparisons import CHEAP, LONG_TAIL, SPEEDUP, OnEvent, compared
from benchmarks.asynchronous.learning import table, wall
from benchmarks.config import AsyncBench, AsyncPart
from benchmarks.machine import machine

Part = Callable[[AsyncBench, OnEvent], dict[str, JSON]]


PARTS: Mapping[AsyncPart, Part] = {
    "speedup": partial(compared, SPEEDUP),
    "table": table,
    "cheap": partial(compared, CHEAP),
    "long-tail": partial(compared, LONG_TAIL),
    "wall": wall,
}


def bench_async(
    bench: AsyncBench, *, only: Sequence[AsyncPart] = (), on_event: OnEvent = print
) -> dict[str, JSON]:
    """Run the parts. only: none = all of them.

    Returns:
        summary: that of each part. parts: every run with its medians and spreads. settings: of the benchmark
        and the machine.
    """
    results: dict[str, dict[str, JSON]] = {}
    for name in [name for name in get_args(AsyncPart) if name in only or not only]:
        on_event(f"{name}:")
        began = time.monotonic()
        results[name] = PARTS[name](bench, on_event)
        results[name]["seconds"] = time.monotonic() - began
    return {
        "benchmark": "async",
        "summary": {name: result["summary"] for name, result in results.items()},
        "parts": dict(results),
        "settings": {**bench.model_dump(mode="json"), "threads": 1, "machine": machine()},
    }
