"""Plays the episodes of a check: new instances, the episode loop, and timed calls."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.base import AnyScript, Env
from agentrl.envs.boundary import call_close, call_reset, call_step
from agentrl.envs.play import play
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.types import JSON, Episode, Finish, Limits, Message, Observation, Step, Task, ToolStats
from agentrl.types.seams import Act, Session, ToolSchema

Policy: TypeAlias = Callable[[Env, Task, random.Random], AnyScript]
"""From an instance (which has its tools after reset), a task and a random generator to a script."""


_MAX_CHARACTERS = 300
_ENDS = 80
HELD = "held"
R = TypeVar("R")


class _Holding(Generic[R]):
    """Awaits a coroutine, and measures the longest time for which it held the event loop (`longest_s`)."""

    def __init__(self, coroutine: Coroutine[object, None, R]) -> None:
        self._coroutine = coroutine
        self.longest_s = 0.0

    def __await__(self) -> Generator[object, None, R]:
        # An iterator of its own would not be told of exceptions; this one is.
        return cast(Generator[object, None, R], self)

    def __iter__(self) -> _Holding[R]:
        return self

    def __next__(self) -> object:
        return self.send(None)

    def send(self, value: None) -> object:
        """Go on up to the next wait."""
        began, computed, switches = time.perf_counter(), time.thread_time(), _switches()
        try:
            return self._coroutine.send(value)
        finally:
            # Another process that took the core holds nothing; computing does, and so does waiting.
            was_taken = _switches() != switches
            since = time.thread_time() - computed if was_taken else time.perf_counter() - began
            self.longest_s = max(self.longest_s, since)

    def throw(self, error: BaseException) -> object:
        """Go on with an exception, such as a cancellation."""
        return self._coroutine.throw(error)

    def close(self) -> None:
        """Give up the rest."""
        self._coroutine.close()


def _switches() -> int:
    """How often the kernel has taken the core from this thread (count)."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


class TimedEnv:
    """An environment for `play` with timed calls: seconds by `reset`, `step`, `last_step` (with reward).

    `held`: for how long a call of step, at a time, kept the event loop from all others. Rewards are kept.
    """

    def __init__(self, env: Env, arena: Arena) -> None:
        self._env = env
        self._seconds, self._failed_closes = arena.seconds, arena.failed_closes
        self._rewards = arena.rewards
        self.id = env.id
        self.limits: Limits = env.limits
        self.possible_agents = env.possible_agents

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools on offer."""
        return self._env.tool_schemas

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts of the world."""
        return self._env.counts

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """The tool statistics of the world."""
        return self._env.tool_stats

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Begin the task, timed."""
        began = time.perf_counter()
        result = await call_reset(self._env, task, seed=seed)
        self._seconds["reset"].append(time.perf_counter() - began)
        return result

    async def step(self, action: Message) -> Step:
        """Answer, timed."""
        began = time.perf_counter()
        calling = _Holding(call_step(self._env, action))
        step = await calling
        self._seconds[HELD].append(calling.longest_s)
        if step.reward is not None:
            self._rewards.append(float(step.reward))
        name = "last_step" if step.terminated or step.truncated else "step"
        self._seconds[name].append(time.perf_counter() - began)
        return step

    async def close(self) -> None:
        """Close the world."""
        try:
            await call_close(self._env)
        except StageError as broken:
            self._failed_closes.append(broken.detail)
            raise


ENDLESS = "and so on, " * 2000
"""The text of a turn that meets the limit of tokens."""


class YieldingAgent(ScriptedAgent):
    """A scripted agent that yields to the event loop before each action, as an agent of a model does.

    leaves_at: the turn, from 0, that it does not finish: the episode is truncated there; None = none.
    """

    def __init__(self, script: AnyScript | Callable[[str], AnyScript], leaves_at: int | None = None) -> None:
        super().__init__(script)
        self._turns_left = leaves_at

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action, one turn of the event loop later."""
        await asyncio.sleep(0)
        if self._turns_left == 0:
            return Act(Message("assistant", ENDLESS), None, finish=Finish.LENGTH)
        if self._turns_left is not None:
            self._turns_left -= 1
        return await super().act(observation, tools=tools, session=session)


class WatchedTurn(NamedTuple):
    """A turn as its agent met it: the observation, the tools on offer, and its action."""

    observation: Observation
    tools: tuple[ToolSchema, ...]
    action: Message


class Watching(YieldingAgent):
    """A scripted agent that keeps what it was shown, turn by turn, in `turns`."""

    def __init__(self, script: AnyScript | Callable[[str], AnyScript], leaves_at: int | None = None) -> None:
        super().__init__(script, leaves_at)
        self.turns: list[WatchedTurn] = []

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The script's next action."""
        act = await super().act(observation, tools=tools, session=session)
        self.turns.append(WatchedTurn(observation, tuple(tools), act.message))
        return act


@dataclass(frozen=True, slots=True)
class Arena:
    """The environment, tasks and seed of all probes.

    example: an instance that is read, never played. tasks: those to play. seed: of all randomness of the
    check. seconds: latencies so far. failed_closes: how `close` failed so far. rewards: of steps so far.
    """

    make: Callable[[], Env]
    example: Env
    tasks: tuple[Task, ...]
    seed: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed_closes: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def some_tasks(self, n: int) -> tuple[Task, ...]:
        """The first `n` tasks, repeated where there are fewer."""
        return tuple(self.tasks[k % len(self.tasks)] for k in range(n)) if self.tasks else ()

    async def play(
        self,
        policy: Policy,
        task: Task,
        *,
        number: int = 0,
        seed: int | None = None,
        leaves_at: int | None = None,
    ) -> Episode:
        """One episode. number: seeds the policy, and the world where `seed` is None.

        leaves_at: the turn, from 0, that the policy does not finish; None = none.

        Raises:
            UserError: the environment raised it.
            StageError: no instance could be created.
        """
        async with stage("make", None):
            env = self.make()
        agent = YieldingAgent(self._script(policy, env, task, number), leaves_at)
        world_seed = self.seed + number if seed is None else seed
        return await play(TimedEnv(env, self), agent, task, seed=world_seed, sampling_seed=number)

    async def watch(self, policy: Policy, task: Task, *, number: int = 0) -> Watching:
        """What a policy is shown in one episode, however that ends. number: as for `play`."""
        async with stage("make", None):
            env = self.make()
        agent = Watching(self._script(policy, env, task, number))
        await outcome(play(TimedEnv(env, self), agent, task, seed=self.seed + number))
        return agent

    def _script(self, policy: Policy, env: Env, task: Task, number: int) -> Callable[[str], AnyScript]:
        rng = random.Random(f"{self.seed}/{task.id}/{number}")
        return lambda _: policy(env, task, rng)


def expert(env: Env, task: Task, _: random.Random) -> AnyScript:
    """The environment's own expert."""
    return env.expert(task)


async def outcome(playing: Awaitable[Episode]) -> Episode | str:
    """The episode, or one line with its failure."""
    try:
        episode = await playing
    except (UserError, StageError) as wrong:
        return f"{type(wrong).__name__}: {wrong}"[:_MAX_CHARACTERS]
    return episode if episode.failure is None else failure_line(episode)


def failure_line(episode: Episode) -> str:
    """The task and the failure of an episode."""
    failure = episode.failure
    what = failure and f"{failure.stage} {failure.kind}: {_cut(failure.detail)}"
    return f"{episode.task.id}: {what}"[:_MAX_CHARACTERS]


def _cut(detail: str) -> str:
    """Without its middle, if it is long: it may quote an argument, and ends with the line of the author."""
    return detail if len(detail) <= 2 * _ENDS else f"{detail[:_ENDS]} ... {detail[-_ENDS:]}"
