"""The cost of the sandbox: calls of the Python tool against a process for every call.

The baseline starts `python -I -S` for every call, with a pipe and without any protection, as the simplest
possible tool would. Both sides run the same number of calls at a time.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.tools import Tool, release_shared
from agentrl.tools.python import PythonTool
from agentrl.tools.python.installation import interpreter
from agentrl.types import JSON
from benchmarks.compare import Side, quantile, rates
from benchmarks.machine import machine


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop: each of `callers` callers sends its next call as soon as it has its result."""

    name: str
    code: str
    callers: int
    calls: int


CLOSED = (
    ClosedLoop("64 callers of print(1+1)", "print(1+1)", 64, 640),
    ClosedLoop("one caller of print(1+1)", "print(1+1)", 1, 100),
    # An adverse case: both sides compute the same, and the tool's output passes through one more process.
    ClosedLoop("8 callers that print 4 MB", "for _ in range(40): print('x' * 10**5)", 8, 48),
)
"""Frozen."""
ARRIVALS_PER_S = 60
ARRIVALS_S = 10
MAX_IN_FLIGHT = 64


def bench_python(*, closed: Sequence[ClosedLoop] = CLOSED, repeats: int = 5) -> dict[str, JSON]:
    """Calls a second in a closed loop, and latencies where calls arrive in an open loop.

    Returns:
        summary: one line per workload. rows: every repeat, medians and spreads (max - min, over the median),
        latencies in milliseconds. settings: of runs and machine.
    """
    return asyncio.run(_bench(closed, repeats))


async def _bench(closed: Sequence[ClosedLoop], repeats: int) -> dict[str, JSON]:
    tool = PythonTool(output_bytes=2000)
    async with tool.episode() as (python,):
        rows = [await _closed(python, workload, repeats) for workload in closed]
        rows.append(await _open(python, repeats))
    await release_shared()
    settings: dict[str, JSON] = {
        "repeats": repeats,
        "machine": machine(),
        "tool": repr(tool),
        "baseline": f"{interpreter()} -I -S -c CODE ({sys.version.split()[0]}), output through one pipe",
        "workloads": [
            {"name": loop.name, "code": loop.code, "callers": loop.callers, "calls": loop.calls}
            for loop in closed
        ],
    }
    return {"summary": {str(row["name"]): row["line"] for row in rows}, "rows": [*rows], "settings": settings}


async def _closed(python: Tool, workload: ClosedLoop, repeats: int) -> dict[str, JSON]:
    calls_each = workload.calls // workload.callers

    async def tool() -> None:
        await python.invoke({"code": workload.code})

    async def process() -> None:
        await _process(workload.code)

    sides = {
        "tool": lambda: _loop(tool, workload.callers, calls_each),
        "a process per call": lambda: _loop(process, workload.callers, calls_each),
    }
    result = await rates(sides, calls_each * workload.callers, "calls_per_s", repeats=repeats)
    tool_per_s, process_per_s = result.medians["tool"], result.medians["a process per call"]
    ratio = tool_per_s / process_per_s
    line = f"{ratio:.2f}x ({tool_per_s:.0f} against {process_per_s:.0f} calls/s)"
    return {"name": workload.name, "line": line, "ratio": ratio, "sides": result.figures}


async def _loop(call: Side, callers: int, calls_each: int) -> None:
    async def caller() -> None:
        for _ in range(calls_each):
            await call()

    await asyncio.gather(*(caller() for _ in range(callers)))


async def _process(code: str) -> None:
    process = await asyncio.create_subprocess_exec(
        interpreter(), "-I", "-S", "-c", code, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env={}
    )
    await process.communicate()


async def _open(python: Tool, repeats: int) -> dict[str, JSON]:
    """Poisson arrivals; above MAX_IN_FLIGHT an arrival waits, and its wait counts."""
    p50s, p99s = [], []
    for repeat in range(repeats):
        seconds = await _arrivals(python, random.Random(repeat))
        p50s.append(1e3 * statistics.median(seconds))
        p99s.append(1e3 * quantile(seconds, 0.99))
    p50, p99 = statistics.median(p50s), statistics.median(p99s)
    name = f"{ARRIVALS_PER_S} arrivals a second for {ARRIVALS_S} s, at most {MAX_IN_FLIGHT} in flight"
    line = f"p50 {p50:.0f} ms, p99 {p99:.0f} ms"
    return {"name": name, "line": line, "p50_ms": [*p50s], "p99_ms": [*p99s]}


async def _arrivals(python: Tool, rng: random.Random) -> list[float]:
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)
    seconds: list[float] = []

    async def arrive(arrival_s: float) -> None:
        await asyncio.sleep(arrival_s - time.perf_counter())
        async with slots:
            await python.invoke({"code": "print(1+1)"})
        seconds.append(time.perf_counter() - arrival_s)

    arrival_s, arrivals = time.perf_counter(), []
    end_s = arrival_s + ARRIVALS_S
    while (arrival_s := arrival_s + rng.expovariate(ARRIVALS_PER_S)) < end_s:
        arrivals.append(arrive(arrival_s))
    await asyncio.gather(*arrivals)
    return seconds
