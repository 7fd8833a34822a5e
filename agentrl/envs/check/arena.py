"""Where a check plays: fresh instances, the one episode loop, a watch on what goes through it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.base import Env, Script
from agentrl.envs.play import play
from agentrl.errors import StageError, UserError, stage
from agentrl.protocols import Act, Session, ToolSchema
from agentrl.types import JSON, Episode, Limits, Message, Observation, Step, Task, ToolStats

Policy: TypeAlias = Callable[[Env, Task, random.Random], Script]
"""How to play a task: a script over the instance (whose tools stand after reset), from its own chance."""


_LINE = 300


class Watched:
    """An environment as `play` sees it, timed: seconds by `reset`, `step` and `last_step` (the reward's)."""

    def __init__(self, env: Env, seconds: dict[str, list[float]]) -> None:
        self._env = env
        self._seconds = seconds
        self.id = env.id
        self.limits: Limits = env.limits
        self.possible_agents = env.possible_agents

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer."""
        return self._env.tool_schemas

    @property
    def counts(self) -> Mapping[str, int]:
        """The world's own counts."""
        return self._env.counts

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """The world's own statistics."""
        return self._env.tool_stats

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin the task, timed."""
        began = time.perf_counter()
        answer = await self._env.reset(task, seed=seed)
        self._seconds["reset"].append(time.perf_counter() - began)
        return answer

    async def step(self, action: Message) -> Step:
        """Answer, timed."""
        began = time.perf_counter()
        step = await self._env.step(action)
        name = "last_step" if step.terminated or step.truncated else "step"
        self._seconds[name].append(time.perf_counter() - began)
        return step

    async def close(self) -> None:
        """Close the world."""
        await self._env.close()


class Thinking(ScriptedAgent):
    """A scripted agent that lets others run before each move, as one that waits for a model does."""

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action, one turn of the event loop later."""
        await asyncio.sleep(0)
        return await super().act(observation, tools=tools, session=session)


@dataclass(frozen=True, slots=True)
class Arena:
    """What every probe works with.

    example: an instance that is only asked, never played. tasks: the ones to play. seed: what all chance
    of the check is drawn from. seconds: latencies so far.
    """

    make: Callable[[], Env]
    example: Env
    tasks: tuple[Task, ...]
    seed: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def some_tasks(self, n: int) -> tuple[Task, ...]:
        """The first `n` tasks; from the start again where there are fewer."""
        return tuple(self.tasks[k % len(self.tasks)] for k in range(n)) if self.tasks else ()

    async def play(self, policy: Policy, task: Task, *, number: int = 0, seed: int | None = None) -> Episode:
        """One episode. number: draws the policy's chance, and the world's where no `seed` is given.

        Raises:
            UserError: the environment itself raised one.
            StageError: no instance could be made.
        """
        async with stage("make", None):
            env = self.make()
        script = policy(env, task, random.Random(f"{self.seed}/{task.id}/{number}"))
        world_seed = self.seed + number if seed is None else seed
        return await play(
            Watched(env, self.seconds), Thinking(script), task, seed=world_seed, sampling_seed=number
        )


def expert(env: Env, task: Task, _: random.Random) -> Script:
    """The environment's own expert."""
    return env.expert(task)


async def outcome(playing: Awaitable[Episode]) -> Episode | str:
    """The episode, or one line about how it failed."""
    try:
        episode = await playing
    except (UserError, StageError) as wrong:
        return f"{type(wrong).__name__}: {wrong}"[:_LINE]
    return episode if episode.failure is None else failure_line(episode)


def failure_line(episode: Episode) -> str:
    """Why an episode failed, and on which task."""
    failure = episode.failure
    return f"{episode.task.id}: {failure and f'{failure.stage} {failure.kind}: {failure.detail}'}"[:_LINE]
