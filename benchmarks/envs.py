"""The cost of the episode loop: `play` against a minimal loop over the same environment.

`play` adds deadlines, limits, the record of every turn and the handling of failures. The minimal loop calls
reset, step and close and nothing else. With slow tools another property is measured: the concurrency of
episodes that wait; there the baseline plays them sequentially.
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
        """Every answer is correct."""
        del task, answer
        return 1.0

    def expert(self, task: Task) -> Script:
        """Call the tool, then answer."""
        del task
        for _ in range(_CALLS):
            yield call("wait")
        yield say("done")


class Instant(SingleTurnEnv):
    """One turn that costs nothing. An adverse case: only the loop is measured."""

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        return [Task.ask(split, "Say something.", answer="something")]

    @inline
    def grade(self, task: Task, answer: str) -> float:
        """Every answer is correct."""
        del task, answer
        return 1.0


def _env(id: str) -> Env:
    return cast(Env, find(id).make())


@dataclass(frozen=True, slots=True)
class EpisodeWorkload:
    """Episodes of the expert. baseline: the `minimal` loop, or `sequential` calls of `play`."""

    name: str
    make: Callable[[], Env]
    episodes: int
    baseline: str = "minimal"


WORKLOADS = (
    EpisodeWorkload("HopSearch-v0", partial(_env, "HopSearch-v0"), 1000),
    EpisodeWorkload("Calculator-v0", partial(_env, "Calculator-v0"), 1000),
    EpisodeWorkload("instant, one turn", Instant, 4000),
    EpisodeWorkload("32 episodes of 4 calls of 50 ms", Waiting, 32, "sequential"),
)
"""Frozen."""


def bench_envs(*, workloads: Sequence[EpisodeWorkload] = WORKLOADS, repeats: int = 5) -> dict[str, JSON]:
    """Episodes a second through `play` and through the baseline, interleaved.

    Returns:
        summary: one line per workload with the ratio of medians. rows: every repeat, medians and spreads
        (max - min, over the median). settings: of runs and machine.
    """
    rows = [asyncio.run(_row(workload, repeats)) for workload in workloads]
    summary: dict[str, JSON] = {str(row["name"]): row["line"] for row in rows}
    frozen: list[JSON] = [
        {"name": workload.name, "episodes": workload.episodes, "baseline": workload.baseline}
        for workload in workloads
    ]
    settings: dict[str, JSON] = {
        "repeats": repeats,
        "machine": machine(),
        "agent": "the environment's expert",
        "workloads": frozen,
    }
    return {"summary": summary, "rows": list(rows), "settings": settings}


async def _row(workload: EpisodeWorkload, repeats: int) -> dict[str, JSON]:
    sides: dict[str, Side] = {
        "play": lambda: _played(workload),
        "baseline": lambda: _sequential(workload, _play_minimal if workload.baseline == "minimal" else _play),
    }
    result = await rates(sides, workload.episodes, "episodes_per_s", repeats=repeats)
    medians = result.medians
    ratio = medians["play"] / medians["baseline"]
    line = f"{ratio:.2f}x ({medians['play']:.0f} against {medians['baseline']:.0f} episodes/s)"
    return {"name": workload.name, "line": line, "ratio": ratio, "sides": result.figures}


async def _played(workload: EpisodeWorkload) -> None:
    """Concurrently where the baseline is sequential, else sequentially, as the baseline."""
    if workload.baseline == "sequential":
        await asyncio.gather(*(_play(workload.make(), index) for index in range(workload.episodes)))
    else:
        await _sequential(workload, _play)


async def _sequential(workload: EpisodeWorkload, play_one: Callable[[Env, int], Awaitable[None]]) -> None:
    for index in range(workload.episodes):
        await play_one(workload.make(), index)


async def _play(env: Env, index: int) -> None:
    task = _task(env, index)
    await play(env, ScriptedAgent(env.expert(task)), task, seed=index)


async def _play_minimal(env: Env, index: int) -> None:
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
