"""The episode loop, which checks, evaluation and training share."""

from __future__ import annotations

import logging
import re
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

from agentrl.envs.boundary import (
    CLOSE_S,
    acting_in,
    as_multi_agent,
    call_close,
    call_joint_reset,
    call_joint_step,
)
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import Stage, all_of, stage
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
    Trajectory,
    Turn,
    Usage,
)
from agentrl.types.seams import Act, Agent, MultiAgentEnvironment, Session, SingleAgentEnvironment, ToolSchema

_NAME = re.compile(r"[A-Za-z]\w*")
_MOST_LOGGED = 20
_logged: set[tuple[str, str]] = set()


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
    seed: of the world; siblings of a group share it. sampling_seed: of the agents. episode_id: "" = made of
    task and seeds.

    Limits and deadlines are `env.limits`. A failure of the world or of the engine is an `Episode` whose
    ending is `failed`, never an exception; UserErrors and cancellation do propagate. The environment and the
    agents are closed in every case. What was played stands where closing fails: that is logged, and counted
    as `failed_closes`.

    Where several agents act in one step, they do so at the same time. An unfinished turn of any agent ends
    the episode: the world never receives an unfinished message.

    Raises:
        UserError: an agent of the environment has no player, or an invalid name.
    """
    game = Game.of(env, agents, task, seed, episode_id, sampling_seed)
    return await game.played(game.run)


@runtime_checkable
class PlaysItself(Protocol):
    """An environment whose episodes may go otherwise than turn by turn."""

    @property
    def response_format(self) -> JSON:
        """The form of the turn that it waits for, as in `Session`; None = any."""

    async def play_game(self, game: Game) -> Ending | None:
        """Play an episode that has not begun; None = turn by turn, as any other."""

    def goes_on_after(self, act: Act) -> bool:
        """Whether it takes a message that has ended before it is whole, and the episode goes on.

        Called after each turn: it also tells how the turn has ended, and what that took.
        """

    def episode_failed(self, failure: Failure) -> None:
        """Called before everything is closed, where the episode has failed."""


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


class Flow:
    """How an episode begins, and how an agent takes a turn; what happens between turns. By default nothing:
    `resuming` has another one."""

    async def begin(self, game: Game) -> Mapping[str, Observation]:
        """The first observations."""
        return await game.reset()

    async def turn(self, game: Game, name: str, observation: Observation) -> Act:
        """An agent's turn."""
        return await game.act(name, observation)

    async def whole(self, game: Game, world: PlaysItself) -> Ending | None:
        """An episode that its environment plays; None = it does not."""
        return await world.play_game(game)

    async def before_turns(self, game: Game) -> None:
        """Called before the turns of a step."""

    def after_turns(
        self, game: Game, observations: Mapping[str, Observation], acts: Mapping[str, Act]
    ) -> None:
        """Called after the turns of a step, and before they are recorded."""


@dataclass(slots=True)
class Game:
    """A running episode. unseen: observations that an agent has not acted on yet, by name.

    spent_s: what the clock of its deadline has counted before (seconds). running: that deadline. own: the
    environment, where it plays itself.
    """

    world: MultiAgentEnvironment
    players: Mapping[str, Agent]
    task: Task
    seed: int
    episode_id: str
    sampling_seed: int
    record: _Record = field(default_factory=_Record)
    unseen: dict[str, Observation] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    flow: Flow = field(default_factory=Flow)
    spent_s: float = 0.0
    running: Stage = field(default_factory=lambda: stage("episode", None))
    own: PlaysItself | None = None

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
        game = cls(world, _players(world, agents), task, seed, episode_id, sampling_seed)
        game.own = env if isinstance(env, PlaysItself) else None
        return game

    def anew(self) -> Game:
        """The same episode, of which nothing is recorded."""
        return replace(self, record=_Record(), turns=Counter(), unseen={})

    async def played(self, run: Callable[[], Awaitable[Ending]]) -> Episode:
        """Play by `run`, close everything, and return the episode."""
        started, limit_s = time.perf_counter(), self.world.limits.episode_timeout_s
        failure: Failure | None = None
        ending = Ending.FAILED
        self.running = stage("episode", None if limit_s is None else max(limit_s - self.spent_s, 0.0))
        try:
            async with self.running:
                ending = await run()
        except StageError as error:
            failure = _failure(error)
            if self.own is not None:
                self.own.episode_failed(failure)
        finally:
            for broken in await self.close():
                self.record.counts["failed_closes"] += 1
                _log(self.world.id, broken)
        seconds = time.perf_counter() - started
        return self.episode(Ending.FAILED if failure else ending, failure, seconds)

    async def run(self) -> Ending:
        """Play turns until the world, a limit or an unfinished message ends the episode."""
        limits = self.world.limits
        if self.own is not None and (ending := await self.flow.whole(self, self.own)) is not None:
            return ending
        observations = await self.flow.begin(self)
        for number in range(len(self.record.rewards), limits.max_turns * len(self.players)):
            self.deliver(observations)
            await self.flow.before_turns(self)
            acting = acting_in(self.world)
            if not acting:
                raise StageError("step", "invalid", "no agent's turn it is, and the episode has not ended")
            if any(self.turns[name] == limits.max_turns for name in acting):
                return Ending.TRUNCATED
            acts = await self.acts(acting, number)
            goes_on, unfinished = self._goes_on_after(acts), ending_of(acts)
            if unfinished is not None and not goes_on:
                return unfinished
            step = await self.step({name: act.message for name, act in acts.items()})
            if step.terminated:
                return Ending.COMPLETED
            if step.truncated:
                return Ending.TRUNCATED
            observations = step.observations
        return Ending.TRUNCATED

    def _goes_on_after(self, acts: Mapping[str, Act]) -> bool:
        return self.own is not None and self.own.goes_on_after(acts[AGENT])

    async def reset(self) -> Mapping[str, Observation]:
        """Begin the task; the first observations."""
        async with stage("reset", self.world.limits.reset_timeout_s):
            observations, _ = await call_joint_reset(self.world, self.task, seed=self.seed)
        return observations

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Pass the actions to the world, and record its rewards."""
        async with stage("step", self.world.limits.step_timeout_s):
            step = await call_joint_step(self.world, actions)
            check_names(step.reward, self.players)
        self.record.rewards.append(step.reward)
        return step

    @property
    def agents(self) -> tuple[str, ...]:
        """Those of the environment, and those that a generate function has added."""
        recorded = (agent for agent, _, _ in self.record.trajectories)
        return tuple(dict.fromkeys((*self.players, *recorded)))

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
            agents=self.agents,
            frozen_agents=frozen,
            seconds=seconds,
        )

    async def close(self) -> list[Failure]:
        """Close all; return the failures. Nothing is raised: that would replace a cancellation."""
        broken: list[Failure] = []
        async with AsyncExitStack() as stack:
            # The last one pushed is closed first; a failure does not stop the others.
            stack.push_async_callback(_closed, partial(call_close, self.world), broken)
            for name, agent in reversed(list(self.players.items())):
                stack.push_async_callback(
                    _closed, partial(agent.close, session_id_of(self.episode_id, name)), broken
                )
        return broken

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
            acts = [await self.flow.turn(self, acting[0], observations[acting[0]])]
        else:
            acts = await all_of([self.flow.turn(self, name, observations[name]) for name in acting])
        self.flow.after_turns(self, observations, dict(zip(acting, acts, strict=True)))
        for name, act in zip(acting, acts, strict=True):
            self.record.add(name, Turn(observations[name], act.message, act.tokens, number), act)
            self.turns[name] += 1
        return dict(zip(acting, acts, strict=True))

    async def act(self, name: str, observation: Observation) -> Act:
        """One turn of an agent, which is not recorded."""
        session = self.session(name, self.turns[name])
        async with stage("act", None, "" if name == AGENT else name):
            return await self.players[name].act(observation, tools=self.world.tools_of(name), session=session)

    def session(self, name: str, number: int) -> Session:
        """An agent's part of the episode in its turn of this number."""
        prefix = "" if name == AGENT else f"{name}/"
        seed = zlib.crc32(f"{self.sampling_seed}/{prefix}{number}".encode())
        form = None if self.own is None else self.own.response_format
        return Session(session_id_of(self.episode_id, name), seed, self.world.limits.max_tokens, form)


def _players(world: MultiAgentEnvironment, agents: Agent | Mapping[str, Agent]) -> dict[str, Agent]:
    names = tuple(world.possible_agents)
    by_name = dict(agents) if isinstance(agents, Mapping) else dict.fromkeys(names[:1], agents)
    if wrong := [name for name in names if not is_name(name)]:
        raise UserError(f"{world.id}: an agent cannot be called {wrong[0]!r}; use letters, digits and `_`.")
    if missing := [name for name in names if name not in by_name]:
        raise UserError(
            f"{world.id}: nobody plays {', '.join(missing)}; pass play() a mapping of all agents."
        )
    return {name: by_name[name] for name in names}


def is_name(name: str) -> bool:
    """Whether an agent may have it."""
    return _NAME.fullmatch(name) is not None and name != "parts"


def _joined(before: Observation, observation: Observation) -> Observation:
    """Unseen messages followed by new ones; a history replaces all messages before it."""
    if isinstance(observation, History) or not before:
        return observation
    messages = (*before, *observation)
    return History(messages, before.reason) if isinstance(before, History) else messages


def ending_of(acts: Mapping[str, Act]) -> Ending | None:
    """How unfinished messages end an episode: the world never receives one; None = all are finished."""
    finishes = {finish_of(act) for act in acts.values()}
    if finishes == {Finish.STOP}:
        return None
    return Ending.ABORTED if Finish.ABORT in finishes else Ending.TRUNCATED


def finish_of(act: Act) -> Finish:
    """Why a turn ended."""
    return act.finish if act.tokens is None else act.tokens.completion.finish


def session_id_of(episode_id: str, agent: str) -> str:
    """The name of an agent's part of an episode, for the engine."""
    return episode_id if agent == AGENT else f"{episode_id}/{agent}"


def check_names(reward: StepReward, players: Collection[str]) -> None:
    """Raises StageError where it rewards somebody else."""
    if reward is None or isinstance(reward, float):
        return
    if unknown := [name for name in reward if name not in players]:
        raise StageError("reward", "invalid", f"there is no agent {unknown[0]!r} to reward")


async def _closed(close: Callable[[], Awaitable[None]], broken: list[Failure]) -> None:
    try:
        async with stage("close", CLOSE_S):
            await close()
    except StageError as error:
        broken.append(_failure(error))


def _log(id: str, broken: Failure) -> None:
    """Each failure to close once: a run has thousands of episodes."""
    if (id, broken.detail) not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add((id, broken.detail))
        logging.getLogger(__name__).warning("%s: `close` fails: %s", id, broken.detail)


def _failure(error: StageError) -> Failure:
    return Failure(error.stage, error.kind, error.detail)
