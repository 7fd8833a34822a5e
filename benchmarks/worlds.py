"""The cost of worlds: episodes a second of each expert, and the sandbox's calls inside concurrent episodes.

The experts are scripts, so the figures are those of resets, steps and rewards. Environments are played one
episode after another. ReTool's episodes are also played together, each with an interpreter of its own, in the
sandbox and, as the baseline, in plain processes without one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from agentrl.envs import Script, ScriptedAgent, find, play, tasks_of
from agentrl.envs.catalog import by_family, catalog, view_of
from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.registry import families, matching
from agentrl.tools import release_shared
from agentrl.types import JSON
from benchmarks.compare import Side, figures_of, interleaved, quantile, rates
from benchmarks.machine import machine

EPISODES = 16
"""In each repeat of each environment."""
AT_ONCE = 256
"""Episodes of ReTool that run together; frozen, as its levels (all three) are."""
SANDBOXES = ("namespaces", "none")


class Calls(NamedTuple):
    """One repeat of concurrent episodes. seconds: of each call, from the action to its observation."""

    wall_s: float
    seconds: list[float]


def ids_of(pattern: str) -> list[str]:
    """The environments with an expert that a pattern names; of a whole family the first.

    Left out are those that need an extra which is not installed, a server, or data.
    """
    shown = families()
    entries = by_family(catalog(matching(pattern)))
    return [
        sorted(shown[entry.id])[0] if entry.id in shown else entry.id
        for entry in entries
        if entry.has_expert and entry.splits and not entry.missing and "server" not in entry.needs
    ]


def bench_worlds(
    *, ids: Sequence[str] = (), episodes: int = EPISODES, at_once: int = AT_ONCE, repeats: int = 5
) -> dict[str, JSON]:
    """Episodes a second of the expert of each environment; the repeats of all take turns.

    ids: left out, all that can be played here, of a family the first. at_once: episodes of ReTool that run
    together.

    Returns:
        summary: one line for each environment. rows: every repeat, medians and spreads (max - min, over the
        median). settings: of runs and machine.
    """
    sides = {id: _side(id, episodes) for id in ids or ids_of("*")}
    result = asyncio.run(rates(sides, episodes, "episodes_per_s", repeats=repeats))
    rows: list[JSON] = [{"name": id, "expert": result.figures[id]} for id in sides]
    summary: dict[str, JSON] = {id: f"{result.medians[id]:.3g} episodes/s" for id in sides}
    together = asyncio.run(_together(at_once, repeats))
    rows.append(together)
    summary[str(together["name"])] = together["line"]
    settings: dict[str, JSON] = {"repeats": repeats, "episodes": episodes, "machine": machine()}
    return {"summary": summary, "rows": rows, "settings": settings}


async def _together(at_once: int, repeats: int) -> dict[str, JSON]:
    """Calls a second and latencies of the sandbox inside concurrent episodes of ReTool."""
    sides = {sandbox: partial(_play_together, sandbox, at_once) for sandbox in SANDBOXES}
    runs = await interleaved(sides, repeats=repeats)
    await release_shared()
    lines, row = [], dict[str, JSON](name=f"ReTool-v0, {at_once} episodes at once")
    for sandbox in SANDBOXES:
        per_s = figures_of([len(run.seconds) / run.wall_s for run in runs[sandbox]])
        p50, p99 = (figures_of([quantile(run.seconds, q) for run in runs[sandbox]]) for q in (0.5, 0.99))
        row[sandbox] = {"calls_per_s": per_s._asdict(), "p50_s": p50._asdict(), "p99_s": p99._asdict()}
        rate = f"{per_s.median:.0f} calls/s (spread {per_s.spread:.0%})"
        lines.append(f"{sandbox}: {rate}, p50 {p50.median:.2f} s, p99 {p99.median:.2f} s")
    return {**row, "line": "; ".join(lines)}


async def _play_together(sandbox: str, at_once: int) -> Calls:
    make = find("ReTool-v0").factory(python={"sandbox": sandbox})
    seconds: list[float] = []

    def timed(script: Script) -> Script:
        action = next(script)
        while True:
            begin = time.perf_counter()
            result = yield action
            if action.tool_calls:
                seconds.append(time.perf_counter() - begin)
            try:
                action = script.send(result)
            except StopIteration:
                return

    begin = time.perf_counter()
    await asyncio.gather(*(_episode(make, number, timed) for number in range(at_once)))
    return Calls(time.perf_counter() - begin, seconds)


def _side(id: str, episodes: int) -> Side:
    make = find(id).factory()

    async def run() -> None:
        for number in range(episodes):
            await _episode(make, number)

    return run


async def _episode(
    make: Callable[[], AnyEnv], number: int, script_of: Callable[[Script], Script] = lambda script: script
) -> None:
    env = view_of(make())
    tasks = tasks_of(env, env.splits[-1])
    task = tasks[number % len(tasks)]
    episode = await play(env, ScriptedAgent(script_of(env.expert(task))), task, seed=number)
    assert episode.failure is None, episode.failure
