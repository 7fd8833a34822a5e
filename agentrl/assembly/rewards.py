"""Resolves the name of a reward function."""

from __future__ import annotations

import inspect
from typing import cast

from agentrl.envs.answers import REWARDS, AnswerReward
from agentrl.errors import ConfigError
from agentrl.tools.names import Names

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
    function = _NAMES.imported(name)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{name} is a {type(function).__name__}; name a function of a task and an answer.")
    try:
        inspect.signature(function).bind("task", "answer")
    except TypeError as error:
        raise ConfigError(
            f"{name}: a reward is called with a task and an answer ({error}); mend it."
        ) from None
    return cast(AnswerReward, function)
