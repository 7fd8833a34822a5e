"""A function that sees each episode when it has ended, before its rewards do."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TypeAlias

from agentrl.envs.play import PlayEpisode
from agentrl.errors import StageError
from agentrl.runtime.stage import stage
from agentrl.tools import run
from agentrl.types import Ending, Episode, Failure, StepReward, Task
from agentrl.types.seams import Agent, MultiAgentEnvironment, SingleAgentEnvironment

SampleHook: TypeAlias = Callable[[Episode], "Episode | Awaitable[Episode | None] | None"]
"""From an episode to one with other counts, rewards of steps, or ending; None = as it is."""

_CHANGES = ("counts", "step_rewards", "ending")
_ENDED = (Ending.COMPLETED, Ending.TRUNCATED)


def hooked(play: PlayEpisode, hook: SampleHook) -> PlayEpisode:
    """A function that plays as `play` does, and then calls the hook.

    It does not see an episode that failed or was aborted. Where it fails, the episode fails, at the stage
    `sample_hook`.
    """

    async def play_hooked(
        env: SingleAgentEnvironment | MultiAgentEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        *,
        seed: int = 0,
        episode_id: str = "",
        sampling_seed: int = 0,
    ) -> Episode:
        episode = await play(env, agents, task, seed=seed, episode_id=episode_id, sampling_seed=sampling_seed)
        if episode.ending not in _ENDED:
            return episode
        try:
            async with stage("sample_hook", env.limits.reward_timeout_s):
                return changed(episode, await run(partial(hook, episode), thread=None))
        except StageError as error:
            failure = Failure(error.stage, error.kind, error.detail)
            return replace(episode, ending=Ending.FAILED, failure=failure)

    return play_hooked


def changed(episode: Episode, returned: object) -> Episode:
    """The episode as a hook returned it.

    Raises:
        ValueError: it is no Episode, or differs in more than counts, rewards of steps, and ending.
    """
    if returned is None:
        return episode
    if not isinstance(returned, Episode):
        raise ValueError(f"a sample hook returns an Episode or None, not {repr(returned)[:80]}")
    own = replace(returned, **{name: getattr(episode, name) for name in _CHANGES})
    if wrong := [f.name for f in fields(Episode) if getattr(own, f.name) is not getattr(episode, f.name)]:
        raise ValueError(f"a sample hook changes {', '.join(_CHANGES)} of an episode, not its {wrong[0]}")
    if returned.ending not in _ENDED:
        raise ValueError(f"an episode that has ended is completed or truncated, not {returned.ending}")
    if len(returned.step_rewards) != len(episode.step_rewards):
        raise ValueError(f"the episode has {len(episode.step_rewards)} steps, and a reward for each")
    for before, after in zip(episode.step_rewards, returned.step_rewards, strict=True):
        _check_reward(before, after)
    return returned


def _check_reward(before: StepReward | None, after: StepReward | None) -> None:
    if before is None or after is None:
        if before is not after:
            raise ValueError("a turn without a step has None in place of a reward; leave it")
        return
    if isinstance(before, Mapping) != isinstance(after, Mapping):
        raise ValueError("rewards of several agents stay a mapping by agent, that of one a number")
    values = after.values() if isinstance(after, Mapping) else [after]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ValueError(f"the reward of a step is {repr(after)[:80]}, not a finite number")
