"""Episodes a second of each environment's expert, through the episode loop, one after another.

The expert is a script, so the figure is the cost of the world: its resets, its steps and its rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentrl.envs import ScriptedAgent, find, play, tasks_of
from agentrl.envs.catalog import by_family, catalog, view_of
from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.registry import families, matching
from agentrl.types import JSON
from benchmarks.compare import Side, rates
from benchmarks.machine import machine

EPISODES = 16
"""In each repeat of each environment."""


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


def bench_worlds(*, ids: Sequence[str] = (), episodes: int = EPISODES, repeats: int = 5) -> dict[str, JSON]:
    """Episodes a second of the expert of each environment; the repeats of all take turns.

    ids: left out, all that can be played here, of a family the first.

    Returns:
        summary: one line for each environment. rows: every repeat, medians and spreads (max - min, over the
        median). settings: of runs and machine.
    """
    sides = {id: _side(id, episodes) for id in ids or ids_of("*")}
    result = asyncio.run(rates(sides, episodes, "episodes_per_s", repeats=repeats))
    rows: list[JSON] = [{"name": id, "expert": result.figures[id]} for id in sides]
    summary: dict[str, JSON] = {id: f"{result.medians[id]:.3g} episodes/s" for id in sides}
    settings: dict[str, JSON] = {"repeats": repeats, "episodes": episodes, "machine": machine()}
    return {"summary": summary, "rows": rows, "settings": settings}


def _side(id: str, episodes: int) -> Side:
    make = find(id).factory()

    async def run() -> None:
        for number in range(episodes):
            await _episode(make, number)

    return run


async def _episode(make: Callable[[], AnyEnv], number: int) -> None:
    env = view_of(make())
    tasks = tasks_of(env, env.splits[-1])
    task = tasks[number % len(tasks)]
    episode = await play(env, ScriptedAgent(env.expert(task)), task, seed=number)
    assert episode.failure is None, episode.failure
