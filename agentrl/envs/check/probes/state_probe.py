"""Checks that an episode which is stopped goes on as if it had not been: `save_state` and `load_state`.

    played    an episode to the end, whose state is saved before every step
    resumed   a new instance, reset to the same task and seed, loads a state and gets the actions after it

Both return the same, and have the same counts at the end. An environment that saves no state has nothing to
check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from agentrl.envs.boundary import (
    as_multi_agent,
    call_joint_reset,
    call_joint_step,
    call_load_state,
    call_save_state,
    closing,
)
from agentrl.envs.check.findings import ProbeResult, error
from agentrl.envs.multi_agent import AnyEnv
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.types import JSON, Episode, JointStep, Message
from agentrl.types.seams import MultiAgentEnvironment

_MOST_STATES = 6

Actions = Mapping[str, Message]
"""The actions of one step, by agent."""


class _Played(NamedTuple):
    """The steps of an episode, the counts after it, and the states before each of them (None = not saved)."""

    steps: Sequence[JointStep]
    counts: Mapping[str, int]
    states: Sequence[JSON]


async def probe_states(make: Callable[[], AnyEnv], episodes: Sequence[Episode]) -> ProbeResult:
    """Play the actions of episodes again, and from some of their states on."""
    for episode in episodes:
        if episode.failure is not None:
            continue
        try:
            problem = await _difference(make, episode)
        except (StageError, UserError) as wrong:
            problem = str(wrong)
        if problem:
            text = (
                f"{episode.task.id}: an episode that was saved goes on otherwise: {problem}. Save all that "
                "steps change in `save_state`, as JSON, or return None there."
            )
            return ProbeResult((error("state-lost", text),))
    return ProbeResult()


async def _difference(make: Callable[[], AnyEnv], episode: Episode) -> str:
    actions = _actions_of(episode)
    played = await _play(make, episode, actions, saves=True)
    saved = [number for number, state in enumerate(played.states) if state is not None]
    # The last ones hold the most.
    for number in saved[-_MOST_STATES:]:
        resumed = await _play(make, episode, actions[number:], state=played.states[number])
        where = f"resumed before step {number + 1} of {len(actions)}"
        for k, (old, new) in enumerate(zip(played.steps[number:], resumed.steps, strict=True)):
            if repr(old) != repr(new):
                return f"{where}, step {number + k + 1} returned something else"
        if resumed.counts != played.counts:
            return f"{where}, the counts are {dict(resumed.counts)}, not {dict(played.counts)}"
    return ""


async def _play(
    make: Callable[[], AnyEnv],
    episode: Episode,
    actions: Sequence[Actions],
    *,
    state: JSON = None,
    saves: bool = False,
) -> _Played:
    """Give these actions to a new instance; from a state on, where there is one."""
    async with stage("make", None):
        env = make()
    world = as_multi_agent(env)
    steps: list[JointStep] = []
    states: list[JSON] = []
    async with closing(env), stage("step", world.limits.episode_timeout_s):
        await call_joint_reset(world, episode.task, seed=episode.seed)
        if state is not None:
            await call_load_state(world, state)
        for action in actions:
            states.append(await call_save_state(world) if saves else None)
            steps.append(await call_joint_step(world, action))
    return _Played(steps, _counts(world), states)


def _counts(world: MultiAgentEnvironment) -> Mapping[str, int]:
    events = {f"{name}/{what}": n for name, stats in world.tool_stats.items() for what, n in stats.events()}
    return {name: n for name, n in {**world.counts, **events}.items() if n}


def _actions_of(episode: Episode) -> Sequence[Actions]:
    """The actions of each step that the world received."""
    steps: list[dict[str, Message]] = [{} for _ in episode.step_rewards]
    for trajectory in episode.trajectories:
        for turn in trajectory.turns:
            if turn.step < len(steps):
                steps[turn.step][trajectory.agent] = turn.action
    return cast(Sequence[Actions], steps)
