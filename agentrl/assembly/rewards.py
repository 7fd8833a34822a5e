"""Resolves the names of graders and the paths of reward functions, and tries them out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from agentrl.assembly.addresses import Addresses, with_addresses
from agentrl.assembly.functions import Trying, function_at
from agentrl.data import Columns, FileSource
from agentrl.envs import AnyEnv, GroupReward, Reward, Scorer, SingleTurnEnv
from agentrl.envs.config import RewardChoice
from agentrl.envs.contract import check_group_reward, check_reward
from agentrl.envs.graders import make_grader, make_group_grader
from agentrl.envs.graders.fitting import misfit
from agentrl.envs.graders.registry import CALL_SERVERS
from agentrl.envs.scoring import AnswerReward, of_last_answers
from agentrl.errors import ConfigError, DataError
from agentrl.tools.names import Names
from agentrl.tools.secrets import with_secrets
from agentrl.types import JSON, Episode, Task

_NO_SETTINGS: Mapping[str, JSON] = MappingProxyType({})
_SAMPLED = 64
_NAMES = Names("reward", "package.module:function", ConfigError)


def reward_function(
    name: str, settings: Mapping[str, JSON] = _NO_SETTINGS, addresses: Addresses = MappingProxyType({})
) -> AnswerReward:
    """The grader of a name, or the function at `package.module:function`.

    settings: of the grader. addresses: of models that are served, in place of "sglang_models.NAME" in them.

    Raises:
        ConfigError: there is no such grader or function, or its parameters are not a task and an answer.
        UserError: the grader does not take these settings.
    """
    if ":" not in name:
        return _made(name, json.dumps(with_addresses(settings, addresses), sort_keys=True))
    function = function_at("reward", name)
    try:
        inspect.signature(cast(AnswerReward, function)).bind("task", "answer")
    except TypeError as error:
        raise ConfigError(
            f"{name}: a reward is called with a task and an answer ({error}); mend it."
        ) from None
    return cast(AnswerReward, function)


@lru_cache(maxsize=64)
def _made(name: str, settings: str) -> AnswerReward:
    # The one that is tried out is the one that grades: it has opened its processes or connections by then.
    return make_grader(name, **with_secrets(json.loads(settings)))


def group_reward(
    name: str, settings: Mapping[str, JSON] = _NO_SETTINGS, addresses: Addresses = MappingProxyType({})
) -> GroupReward:
    """The group grader of a name, or the group reward at an import path: a function of siblings, or a
    `GroupReward` with weight and name. settings, addresses: as for `reward_function`.

    Raises:
        ConfigError: there is no such grader or function.
        UserError: the grader does not take these settings.
    """
    if ":" not in name:
        chosen = with_addresses(settings, addresses)
        weight = chosen.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ConfigError(f"group_reward_kwargs: the weight is {weight!r}; give a number.")
        return make_group_grader(name, weight=weight, **with_secrets(chosen))
    imported = _NAMES.imported(name)
    if isinstance(imported, GroupReward):
        return imported
    function = cast(Callable[[Sequence[Episode]], Sequence[float]], function_at("group reward", name))
    return GroupReward(function)


async def misfits(
    name: str | None, settings: Mapping[str, JSON], tasks: Sequence[Task], env: AnyEnv | None = None
) -> list[str]:
    """Why a grader cannot tell right from wrong answers to some tasks: one clause for each of these.

    The label, written as the prompt asks for it, has to get full marks, and an empty answer none. Where no
    label is an answer (`code`, `ifeval`), only the empty one is graded; a grader that calls a server, and a
    function by its path, are not asked.

    name: the grader; None = the environment's own, if it is one of a single answer. env: the environment.

    Raises:
        UserError: the grader cannot be made.
    """
    own = env.grade if name is None and isinstance(env, SingleTurnEnv) else None
    if own is None and (name is None or name in CALL_SERVERS or ":" in name):
        return []
    reward = own or reward_function(name or "", settings)
    reasons = [await misfit(reward, task, has_full_marks=own is None) for task in tasks]
    return [f"{task.id}: {why}" for task, why in zip(tasks, reasons, strict=True) if why is not None]


async def misfits_of_rows(
    name: str, settings: Mapping[str, JSON], path: str, columns: Columns, *, split: str
) -> list[str]:
    """`misfits` of some rows of a file, evenly from all of it; each names its line or row.

    Raises:
        UserError: the file cannot be opened, or the grader cannot be made.
    """
    source = FileSource(path, columns, shuffle=False, split=split, is_checked=False)
    tasks = []
    for number in range(0, source.num_tasks, -(-source.num_tasks // _SAMPLED)):
        with suppress(DataError):  # the report names rows that are no prompts
            tasks.append(replace(source.task_of_row(number), id=source.where(number)))
    return await misfits(name, settings, tasks)


async def build_scorer(
    choice: RewardChoice,
    make_env: Callable[[], AnyEnv],
    task: Task | None,
    addresses: Addresses = MappingProxyType({}),
) -> Scorer:
    """The scorer of an environment's rewards and the configured group reward.

    task: graders and functions by path are tried out on it; None = there is no task.
    addresses: as for `reward_function`.

    Raises:
        ConfigError: one of them cannot be made or imported, or fails.
    """
    if choice.reward is not None and task is not None:
        with Trying(choice.reward):
            await check_reward(reward_function(choice.reward, choice.reward_kwargs, addresses), task)
    env = make_env()
    rewards: list[Reward | GroupReward] = list(env.rewards)
    own = choice.env_reward_weight
    if choice.reward is not None and own is not None:
        function = reward_function(choice.reward, choice.reward_kwargs, addresses)
        name = choice.reward.rpartition(":")[2]
        rewards = [replace(reward, weight=own * reward.weight) for reward in rewards]
        rewards.append(of_last_answers(function, name))
    if choice.group_reward is not None:
        compares = group_reward(choice.group_reward, choice.group_reward_kwargs, addresses)
        if task is not None:
            with Trying(choice.group_reward):
                await check_group_reward(compares, make_env, task)
        rewards.append(compares)
    return Scorer(tuple(rewards), step_weight=1.0 if own is None else own)
