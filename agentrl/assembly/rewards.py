"""Resolves the names of reward functions, and tries them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import cast

from agentrl.assembly.functions import Trying, function_at
from agentrl.envs import AnyEnv, GroupReward, Reward, Scorer
from agentrl.envs.answers import REWARDS, AnswerReward
from agentrl.envs.config import RewardChoice
from agentrl.envs.contract import check_group_reward, check_reward
from agentrl.errors import ConfigError
from agentrl.tools.names import Names
from agentrl.types import Episode, Task

_NAMES = Names("reward", "package.module:function", ConfigError)


def reward_function(name: str) -> AnswerReward:
    """The built-in reward function with a name, or the function at `package.module:function`.

    Raises:
        ConfigError: there is no such function, or its parameters are not a task and an answer.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise _NAMES.unknown(name, REWARDS)
    function = function_at("reward", name)
    try:
        inspect.signature(cast(AnswerReward, function)).bind("task", "answer")
    except TypeError as error:
        raise ConfigError(
            f"{name}: a reward is called with a task and an answer ({error}); mend it."
        ) from None
    return cast(AnswerReward, function)


def group_reward(path: str) -> GroupReward:
    """The group reward at an import path: a function of siblings, or a `GroupReward` with weight and name.

    Raises:
        ConfigError: there is no such function.
    """
    imported = _NAMES.imported(path)
    if isinstance(imported, GroupReward):
        return imported
    function = cast(Callable[[Sequence[Episode]], Sequence[float]], function_at("group reward", path))
    return GroupReward(function)


async def build_scorer(choice: RewardChoice, make_env: Callable[[], AnyEnv], task: Task | None) -> Scorer:
    """The scorer of an environment's rewards and the configured group reward.

    task: functions by path are tried out on it; None = there is no task.

    Raises:
        ConfigError: one of them cannot be imported, or fails.
    """
    if choice.reward is not None and ":" in choice.reward and task is not None:
        with Trying(choice.reward):
            await check_reward(reward_function(choice.reward), task)
    rewards: list[Reward | GroupReward] = list(make_env().rewards)
    if choice.group_reward is not None:
        own = group_reward(choice.group_reward)
        if task is not None:
            with Trying(choice.group_reward):
                await check_group_reward(own, make_env, task)
        rewards.append(own)
    return Scorer(tuple(rewards))
