"""What the episode loop costs: `play` against a bare loop over the same world, and against the clock.

`play` adds to a world its deadlines, its limits, the record of every turn and the care for failures. The
bare loop calls reset, step and close and nothing else. Slow tools measure something else: how much of the
waiting of many episodes `play` does at once; there the baseline plays them one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from agentrl.envs import Env, Script, ScriptedAgent, SingleTurnEnv, ToolEnv, find, play
from agentrl.tools import inline
from agentrl.types import JSON, Task, call, say
from benchmarks.compare import Side, rates
from benchmarks.machine import machine

_TOOL_S = 0.05
_CALLS = 4


class Waiting(ToolEnv):
    """Four calls of a tool that takes 50 ms, as if over a network."""

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(_TOOL_S)
        return "done"

    tools = (wait,)

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        return [Task.ask(split, "Wait.")]

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """Anything will do."""
        del task, answer
        return 1.0

    def expert(self, task: Task) -> Script:
        """Call the tool, then answer."""
        del task
        for _ in range(_CALLS):
            yield call("wait")
        yield say("done")


class Instant(SingleTurnEnv):
    """One turn that costs nothing. This one hurts: all that is left to measure is the loop."""

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        return [Task.ask(split, "Say something.", answer="something")]

    @inline
    def grade(self, task: Task, answer: str) -> float:
        """Anything will do."""
        del task, answer
        return 1.0


def _made(id: str) -> Env:
    return cast(Env, find(id).make())


@dataclass(frozen=True, slots=True)
class Workload:
    """Episodes of an expert's. baseline: `bare` loop, or `play` for one episode `after` another."""

    name: str
    make: Callable[[], Env]
    episodes: int
    baseline: str = "bare"


WORKLOADS = (
    Workload("HopSearch-v0", partial(_made, "HopSearch-v0"), 1000),
    Workload("Calculator-v0", partial(_made, "Calculator-v0"), 1000),
    Workload("instant, one turn", Instant, 4000),
    Workload("32 episodes of 4 calls of 50 ms", Waiting, 32, "after"),
)
"""Frozen."""


def bench_envs(*, workloads: Sequence[Workload] = WORKLOADS, repeats: int = 5) -> dict[str, JSON]:
    """Episodes a second through `play` and through the baseline, interleaved.

    Returns:
        summary: one line per workload with the ratio of medians. rows: every repeat, medians and spreads
        (max - min, over the median). settings: what was run, on what.
    """
    rows = [asyncio.run(_row(workload, repeats)) for workload in workloads]
    told: dict[str, JSON] = {str(row["name"]): row["line"] for row in rows}
    frozen: list[JSON] = [
        {"name": one.name, "episodes": one.episodes, "baseline": one.baseline} for one in workloads
    ]
    settings: dict[str, JSON] = {
        "repeats": repeats,
        "machine": machine(),
        "agent": "the environment's expert",
        "workloads": frozen,
    }
    return {"summary": told, "rows": list(rows), "settings": settings}


async def _row(workload: Workload, repeats: int) -> dict[str, JSON]:
    sides: dict[str, Side] = {
        "play": lambda: _played(workload),
        "baseline": lambda: _one_by_one(workload, _bare if workload.baseline == "bare" else _play),
    }
    found = await rates(sides, workload.episodes, "episodes_per_s", repeats=repeats)
    medians = found.medians
    ratio = medians["play"] / medians["baseline"]
    line = f"{ratio:.2f}x ({medians['play']:.0f} against {medians['baseline']:.0f} episodes/s)"
    return {"name": workload.name, "line": line, "ratio": ratio, "sides": found.told}


async def _played(workload: Workload) -> None:
    """All at once where that saves waiting, else one by one: the baseline is one by one too."""
    if workload.baseline == "after":
        await asyncio.gather(*(_play(workload.make(), index) for index in range(workload.episodes)))
    else:
        await _one_by_one(workload, _play)


async def _one_by_one(workload: Workload, one: Callable[[Env, int], Awaitable[None]]) -> None:
    for index in range(workload.episodes):
        await one(workload.make(), index)


async def _play(env: Env, index: int) -> None:
    task = _task(env, index)
    await play(env, ScriptedAgent(env.expert(task)), task, seed=index)


async def _bare(env: Env, index: int) -> None:
    """reset, step until the end, close: no deadline, no record."""
    task = _task(env, index)
    script = env.expert(task)
    await env.reset(task, seed=index)
    action = next(script)
    while True:
        step = await env.step(action)
        if step.terminated or step.truncated:
            break
        action = script.send("\n".join(message.text for message in step.observation))
    await env.close()


def _task(env: Env, index: int) -> Task:
    tasks = env.tasks("train")
    return tasks[index % len(tasks)]
