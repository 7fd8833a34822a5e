"""The one episode loop: checks, evaluation and training all play through it."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace

from agentrl.errors import StageError, stage
from agentrl.protocols import Agent, Env, Session
from agentrl.types import Ending, Episode, Failure, Finish, Restart, Step, Task, Trajectory, Turn

_CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Record:
    """What has happened so far; frozen into an Episode at the end."""

    trajectories: list[tuple[Restart | None, list[Turn]]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, turn: Turn, restart: Restart | None) -> None:
        """Append a turn; where the agent began anew, to a trajectory of its own."""
        if restart is not None or not self.trajectories:
            self.trajectories.append((restart, []))
        self.trajectories[-1][1].append(turn)

    def frozen(self) -> tuple[Trajectory, ...]:
        """The trajectories; each but the first continues the one before it."""
        return tuple(
            Trajectory(tuple(turns)) if restart is None else Trajectory(tuple(turns), index - 1, restart)
            for index, (restart, turns) in enumerate(self.trajectories)
        )


async def play(
    env: Env,
    agent: Agent,
    task: Task,
    *,
    seed: int = 0,
    episode_id: str = "",
    sampling_seed: int = 0,
) -> Episode:
    """Play one episode of `task` and return what happened, whatever happened.

    seed: the world's; siblings of a group share it. sampling_seed: the agent's own.
    Limits and deadlines are `env.limits`. A failure of the world or of the engine is an
    Episode whose ending is `failed`, never an exception; UserErrors and cancellation do
    propagate. The environment and the agent are closed in every case.
    """
    started = time.perf_counter()
    episode_id = episode_id or f"{task.id}-{seed}-{sampling_seed}"
    record = _Record()
    failure: Failure | None = None
    ending = Ending.FAILED
    try:
        async with stage("episode", env.limits.episode_timeout_s):
            session = Session(episode_id, sampling_seed, env.limits.max_tokens)
            ending = await _run(env, agent, task, seed, session, record)
    except StageError as error:
        failure = _failure(error)
    finally:
        broken = await _close(env, agent, episode_id)
    # A world that failed often cannot be closed either: the first failure is the one to tell.
    failure = failure or broken
    record.counts.update(env.counts)
    return Episode(
        id=episode_id,
        env_id=env.id,
        task=task,
        seed=seed,
        limits=env.limits,
        trajectories=record.frozen(),
        step_rewards=tuple(record.rewards),
        ending=Ending.FAILED if failure else ending,
        failure=failure,
        counts=dict(record.counts),
        seconds=time.perf_counter() - started,
    )


async def _run(env: Env, agent: Agent, task: Task, seed: int, session: Session, record: _Record) -> Ending:
    limits = env.limits
    async with stage("reset", limits.reset_timeout_s):
        observation, _ = await env.reset(task, seed=seed)
    for turn in range(limits.max_turns):
        async with stage("act", None):
            act = await agent.act(observation, tools=env.tool_schemas, session=_turn(session, turn))
        record.add(Turn(observation, act.message, act.tokens), act.restart)
        record.counts.update(act.counts)
        finish = act.finish if act.tokens is None else act.tokens.completion.finish
        if finish is not Finish.STOP:
            # An unfinished message is never shown to the world: its end is missing.
            return Ending.ABORTED if finish is Finish.ABORT else Ending.TRUNCATED
        async with stage("step", limits.step_timeout_s):
            step = await env.step(act.message)
            _check_reward(step)
        record.rewards.append(step.reward)
        if step.terminated:
            return Ending.COMPLETED
        if step.truncated:
            return Ending.TRUNCATED
        observation = step.observation
    return Ending.TRUNCATED


def _turn(session: Session, turn: int) -> Session:
    return replace(session, seed=zlib.crc32(f"{session.seed}/{turn}".encode()))


def _check_reward(step: Step) -> None:
    if step.reward is not None and not math.isfinite(step.reward):
        raise StageError("reward", "invalid", f"the reward is {step.reward}, return a finite number")


async def _close(env: Env, agent: Agent, episode_id: str) -> Failure | None:
    """Close both and say what broke. Nothing is raised: it would replace a cancellation in flight."""
    try:
        first = await _closed(agent.close(episode_id))
    finally:
        second = await _closed(env.close())
    return first or second


async def _closed(closing: Awaitable[None]) -> Failure | None:
    try:
        async with stage("close", _CLOSE_TIMEOUT_S):
            await closing
    except StageError as error:
        return _failure(error)
    return None


def _failure(error: StageError) -> Failure:
    return Failure(error.stage, error.kind, error.detail)
