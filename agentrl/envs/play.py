"""The episode loop, which checks, evaluation and training share."""

from __future__ import annotations

import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeGuard, cast

from agentrl.errors import StageError, UserError, all_of, stage
from agentrl.protocols import Act, Agent, MultiAgentEnvironment, Session, SingleAgentEnvironment, ToolSchema
from agentrl.types import (
    AGENT,
    JSON,
    Ending,
    Episode,
    Failure,
    Finish,
    History,
    JointStep,
    Message,
    Observation,
    Restart,
    StepReward,
    Task,
    ToolStats,
    Trajectory,
    Turn,
    Usage,
)

_CLOSE_TIMEOUT_S = 10.0
_NAME = re.compile(r"[A-Za-z]\w*")


@dataclass(slots=True)
class _Record:
    """The record of an episode so far; converted into an Episode at the end."""

    trajectories: list[tuple[str, Restart | None, list[Turn]]] = field(default_factory=list)
    rewards: list[StepReward] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    usage: Usage | None = None

    def add(self, agent: str, turn: Turn, act: Act) -> None:
        """Append a turn to its agent's trajectory; after a restart of the agent, to a new trajectory."""
        existing = [turns for name, _, turns in self.trajectories if name == agent]
        if act.restart is not None or not existing:
            self.trajectories.append((agent, act.restart, [turn]))
        else:
            existing[-1].append(turn)
        self.counts.update(act.counts)
        if act.usage is not None:
            self.usage = act.usage if self.usage is None else self.usage + act.usage

    def frozen(self, frozen_agents: Collection[str]) -> tuple[Trajectory, ...]:
        """The trajectories; each but an agent's first continues the agent's previous one."""
        trajectories: list[Trajectory] = []
        latest: dict[str, int] = {}
        for index, (agent, restart, turns) in enumerate(self.trajectories):
            parent = None if restart is None else latest[agent]
            trajectories.append(Trajectory(tuple(turns), parent, restart, agent, agent not in frozen_agents))
            latest[agent] = index
        return tuple(trajectories)


class PlayEpisode(Protocol):
    """Plays one episode, as `play` does."""

    def __call__(
        self,
        env: SingleAgentEnvironment | MultiAgentEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        *,
        seed: int = 0,
        episode_id: str = "",
        sampling_seed: int = 0,
    ) -> Coroutine[None, None, Episode]:
        """See `play`."""


async def play(
    env: SingleAgentEnvironment | MultiAgentEnvironment,
    agents: Agent | Mapping[str, Agent],
    task: Task,
    *,
    seed: int = 0,
    episode_id: str = "",
    sampling_seed: int = 0,
) -> Episode:
    """Play one episode of `task` and return it, however it ended.

    agents: one, or one for each of `env.possible_agents` by name; those wrapped in `Frozen` are not trained.
    seed: of the world; siblings of a group share it. sampling_seed: of the agents.
    Limits and deadlines are `env.limits`. A failure of the world or of the engine is an
    Episode whose ending is `failed`, never an exception; UserErrors and cancellation do
    propagate. The environment and the agents are closed in every case.

    Where several agents act in one step, they do so at the same time. An unfinished turn of any agent ends
    the episode: the world never receives an unfinished message.

    Raises:
        UserError: an agent of the environment has no player, or an invalid name.
    """
    game = Game.of(env, agents, task, seed, episode_id, sampling_seed)
    return await game.played(game.run)


class Frozen:
    """An agent that is not trained, such as an opponent or a judge."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The agent's action."""
        return await self._agent.act(observation, tools=tools, session=session)

    async def close(self, session_id: str) -> None:
        """Close the agent."""
        await self._agent.close(session_id)


def has_several_agents(
    env: SingleAgentEnvironment | MultiAgentEnvironment,
) -> TypeGuard[MultiAgentEnvironment]:
    """Whether an environment has several agents: it then has an attribute `acting`."""
    return hasattr(env, "acting")


def as_multi_agent(env: SingleAgentEnvironment | MultiAgentEnvironment) -> MultiAgentEnvironment:
    """The environment as one of several agents; one of a single agent is wrapped."""
    if has_several_agents(env):
        return env
    return SingleAgent(cast(SingleAgentEnvironment, env))


@dataclass(slots=True)
class Game:
    """A running episode. unseen: observations that an agent has not acted on yet, by name."""

    world: MultiAgentEnvironment
    players: Mapping[str, Agent]
    task: Task
    seed: int
    episode_id: str
    sampling_seed: int
    record: _Record = field(default_factory=_Record)
    unseen: dict[str, Observation] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        env: SingleAgentEnvironment | MultiAgentEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        seed: int,
        episode_id: str,
        sampling_seed: int,
    ) -> Game:
        """An episode that has not begun; the arguments are those of `play`.

        Raises:
            UserError: an agent of the environment has no player, or an invalid name.
        """
        world = as_multi_agent(env)
        episode_id = episode_id or f"{task.id}-{seed}-{sampling_seed}"
        return cls(world, _players(world, agents), task, seed, episode_id, sampling_seed)

    async def played(self, run: Callable[[], Awaitable[Ending]]) -> Episode:
        """Play by `run`, close everything, and return the episode."""
        started = time.perf_counter()
        failure: Failure | None = None
        ending = Ending.FAILED
        try:
            async with stage("episode", self.world.limits.episode_timeout_s):
                ending = await run()
        except StageError as error:
            failure = _failure(error)
        finally:
            broken = await self.close()
        # A world that failed often cannot be closed either: the first failure is reported.
        failure = failure or broken
        seconds = time.perf_counter() - started
        return self.episode(Ending.FAILED if failure else ending, failure, seconds)

    async def run(self) -> Ending:
        """Play turns until the world, a limit or an unfinished message ends the episode."""
        limits = self.world.limits
        observations = await self.reset()
        for number in range(limits.max_turns * len(self.players)):
            self.deliver(observations)
            acting = [name for name in self.world.possible_agents if name in self.world.acting]
            if not acting:
                raise StageError("step", "invalid", "no agent's turn it is, and the episode has not ended")
            if any(self.turns[name] == limits.max_turns for name in acting):
                return Ending.TRUNCATED
            acts = await self.acts(acting, number)
            unfinished = ending_of(acts)
            if unfinished is not None:
                return unfinished
            step = await self.step({name: act.message for name, act in acts.items()})
            if step.terminated:
                return Ending.COMPLETED
            if step.truncated:
                return Ending.TRUNCATED
            observations = step.observations
        return Ending.TRUNCATED

    async def reset(self) -> Mapping[str, Observation]:
        """Begin the task; the first observations."""
        async with stage("reset", self.world.limits.reset_timeout_s):
            observations, _ = await self.world.reset(self.task, seed=self.seed)
        return observations

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Pass the actions to the world, and record its rewards."""
        async with stage("step", self.world.limits.step_timeout_s):
            step = await self.world.step(actions)
            _check_reward(step.reward, self.players)
        self.record.rewards.append(step.reward)
        return step

    def episode(self, ending: Ending, failure: Failure | None, seconds: float) -> Episode:
        """The record as an Episode."""
        world, record = self.world, self.record
        frozen = tuple(name for name, agent in self.players.items() if isinstance(agent, Frozen))
        return Episode(
            id=self.episode_id,
            env_id=world.id,
            task=self.task,
            seed=self.seed,
            limits=world.limits,
            trajectories=record.frozen(frozen),
            step_rewards=tuple(record.rewards),
            ending=ending,
            failure=failure,
            counts=dict(record.counts + Counter(world.counts)),
            tools=dict(world.tool_stats),
            usage=record.usage,
            agents=tuple(self.players),
            frozen_agents=frozen,
            seconds=seconds,
        )

    async def close(self) -> Failure | None:
        """Close all; return the first failure. Nothing is raised: that would replace a cancellation."""
        broken: list[Failure] = []
        async with AsyncExitStack() as stack:
            # The last one pushed is closed first; a failure does not stop the others.
            stack.push_async_callback(_closed, self.world.close, broken)
            for name, agent in reversed(list(self.players.items())):
                stack.push_async_callback(
                    _closed, partial(agent.close, _session_id(self.episode_id, name)), broken
                )
        return broken[0] if broken else None

    def deliver(self, observations: Mapping[str, Observation]) -> None:
        """Add observations to those that their agents have not acted on yet."""
        for name, observation in observations.items():
            if name not in self.players:
                raise StageError("step", "invalid", f"there is no agent {name!r} to show something to")
            self.unseen[name] = _joined(self.unseen.get(name, ()), observation)

    async def acts(self, acting: Sequence[str], number: int) -> dict[str, Act]:
        """One turn of each, at the same time; recorded in the order of `acting`."""
        observations = {name: self.unseen.pop(name, ()) for name in acting}
        if len(acting) == 1:
            # Without a task of its own, cancellation and deadlines reach the agent's own await.
            acts = [await self._act(acting[0], observations[acting[0]])]
        else:
            acts = await all_of([self._act(name, observations[name]) for name in acting])
        for name, act in zip(acting, acts, strict=True):
            self.record.add(name, Turn(observations[name], act.message, act.tokens, number), act)
            self.turns[name] += 1
        return dict(zip(acting, acts, strict=True))

    async def _act(self, name: str, observation: Observation) -> Act:
        session = Session(_session_id(self.episode_id, name), self._seed(name), self.world.limits.max_tokens)
        async with stage("act", None):
            return await self.players[name].act(observation, tools=self.world.tools_of(name), session=session)

    def _seed(self, name: str) -> int:
        prefix = "" if name == AGENT else f"{name}/"
        return zlib.crc32(f"{self.sampling_seed}/{prefix}{self.turns[name]}".encode())


class SingleAgent:
    """An environment of one agent with the interface of several."""

    def __init__(self, env: SingleAgentEnvironment) -> None:
        self._env = env
        self.id, self.limits = env.id, env.limits
        self.possible_agents = self.acting = tuple(env.possible_agents)
        (self._name,) = self.possible_agents

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """That of the environment."""
        return self._env.tool_schemas

    @property
    def counts(self) -> Mapping[str, int]:
        """That of the environment."""
        return self._env.counts

    @property
    def tool_stats(self) -> Mapping[str, ToolStats]:
        """That of the environment."""
        return self._env.tool_stats

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The environment's tools."""
        del agent
        return self._env.tool_schemas

    async def reset(self, task: Task, *, seed: int) -> tuple[Mapping[str, Observation], Mapping[str, JSON]]:
        """Begin `task`."""
        observation, info = await self._env.reset(task, seed=seed)
        return {self._name: observation}, info

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer the agent."""
        step = await self._env.step(actions[self._name])
        observations = {self._name: step.observation}
        return JointStep(observations, step.reward, step.terminated, step.truncated, step.info)

    async def close(self) -> None:
        """Close the environment."""
        await self._env.close()


def _players(world: MultiAgentEnvironment, agents: Agent | Mapping[str, Agent]) -> dict[str, Agent]:
    names = tuple(world.possible_agents)
    by_name = dict(agents) if isinstance(agents, Mapping) else dict.fromkeys(names[:1], agents)
    if wrong := [name for name in names if not _NAME.fullmatch(name) or name == "parts"]:
        raise UserError(f"{world.id}: an agent cannot be called {wrong[0]!r}; use letters, digits and `_`.")
    if missing := [name for name in names if name not in by_name]:
        raise UserError(
            f"{world.id}: nobody plays {', '.join(missing)}; pass play() a mapping of all agents."
        )
    return {name: by_name[name] for name in names}


def _joined(before: Observation, observation: Observation) -> Observation:
    """Unseen messages followed by new ones; a history replaces all messages before it."""
    if isinstance(observation, History) or not before:
        return observation
    messages = (*before, *observation)
    return History(messages, before.reason) if isinstance(before, History) else messages


def ending_of(acts: Mapping[str, Act]) -> Ending | None:
    """How unfinished messages end an episode: the world never receives one; None = all are finished."""
    finishes = {_finish(act) for act in acts.values()}
    if finishes == {Finish.STOP}:
        return None
    return Ending.ABORTED if Finish.ABORT in finishes else Ending.TRUNCATED


def _finish(act: Act) -> Finish:
    return act.finish if act.tokens is None else act.tokens.completion.finish


def _session_id(episode_id: str, agent: str) -> str:
    return episode_id if agent == AGENT else f"{episode_id}/{agent}"


def _check_reward(reward: StepReward, players: Collection[str]) -> None:
    rewards = reward if isinstance(reward, Mapping) else {"": reward}
    if unknown := [name for name in rewards if name and name not in players]:
        raise StageError("reward", "invalid", f"there is no agent {unknown[0]!r} to reward")
    for value in rewards.values():
        if value is not None and not math.isfinite(value):
            raise StageError("reward", "invalid", f"the reward is {value}, return a finite number")


async def _closed(close: Callable[[], Awaitable[None]], broken: list[Failure]) -> None:
    try:
        async with stage("close", _CLOSE_TIMEOUT_S):
            await close()
    except StageError as error:
        broken.append(_failure(error))


def _failure(error: StageError) -> Failure:
    return Failure(error.stage, error.kind, error.detail)
