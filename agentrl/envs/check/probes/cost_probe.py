"""Measures latencies and memory. It gives figures and warnings, never errors: machines differ."""

from __future__ import annotations

import gc
import math
import time
import tracemalloc
from collections.abc import Mapping, Sequence

from agentrl.envs.check.arena import Arena, Policy, outcome
from agentrl.envs.check.findings import Code, ProbeResult, warning

SLOW_MS = 1000.0
"""Medians above this give a warning."""
GROWS_MIB = 1.0
"""Memory for 100 episodes; growth above this gives a warning."""
HOLDS_S = 0.1
"""A longer hold of the event loop counts."""
_SLOW: Mapping[str, Code] = {
    "reset": "slow-reset",
    "step": "slow-step",
    "last_step": "slow-last-step",
    "rewards": "slow-rewards",
}
_FEW, _RARE = 3, 0.02
_EPISODES = 100
_PER = 100
_WARM_UP = 10
_MAX_PLAY_S = 2.0


def latencies(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds of all timed calls.

    reset; step; last_step, which includes `reward` or `grade`; rewards: all of `Env.rewards` together.
    """
    figures = {}
    for name, values in sorted(seconds.items()):
        ordered = sorted(values)
        figures[f"{name}_ms"] = 1e3 * ordered[len(ordered) // 2]
        figures[f"{name}_p99_ms"] = 1e3 * ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)))]
    return figures


def holding(seconds: Sequence[float]) -> ProbeResult:
    """A warning where calls of step hold the event loop. seconds: for how long at a time, call by call.

    Another process may have the core for a while: a few of many calls prove nothing.
    """
    long = sorted(value for value in seconds if value > HOLDS_S)
    if len(long) < max(_FEW, _RARE * len(seconds)):
        return ProbeResult()
    text = (
        f"{len(long)} of {len(seconds)} calls of step hold the event loop, {long[len(long) // 2]:.2g} s at a "
        "time, in which no other episode goes on; await what waits (asyncio.sleep, an async client), or "
        "write `def` in place of `async def`: such a function gets a thread."
    )
    return ProbeResult((warning("blocks-loop", text),))


def slow(figures: Mapping[str, float]) -> ProbeResult:
    """Warnings about medians that slow a rollout."""
    findings = []
    for name, code in _SLOW.items():
        median = figures.get(f"{name}_ms", 0.0)
        if median > SLOW_MS:
            text = f"the median {name} takes {median:.0f} ms; build what is expensive once, in the module."
            findings.append(warning(code, text))
    return ProbeResult(tuple(findings))


async def probe_memory(arena: Arena, policy: Policy) -> ProbeResult:
    """The memory of Python objects (numpy arrays included) that 100 more episodes keep alive, in MiB.

    `memory_peak_mib` is the most that they took at a time. Of slow episodes fewer are played, and the first
    figure is scaled.
    """
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        await _play(arena, policy, _WARM_UP)
        before = _traced_bytes()
        count = await _play(arena, policy, _EPISODES)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        grown = (_traced_bytes() - before) / count * _PER / 2**20
    finally:
        if not tracing:
            tracemalloc.stop()
    figures = {"memory_mib_per_100_episodes": grown, "memory_peak_mib": peak}
    if grown <= GROWS_MIB:
        return ProbeResult((), figures)
    text = f"100 episodes leave {grown:.1f} MiB behind; do not keep episodes in the module or in the class."
    return ProbeResult((warning("memory-grows", text),), figures)


async def _play(arena: Arena, policy: Policy, num_episodes: int) -> int:
    began = time.perf_counter()
    count = 0
    for count, task in enumerate(arena.some_tasks(num_episodes), start=1):
        await outcome(arena.play(policy, task, number=count))
        if time.perf_counter() - began > _MAX_PLAY_S:
            break
    return count


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
