"""From a name to what an answer is worth."""

from __future__ import annotations

import inspect
from typing import cast

from agentrl.envs.answers import REWARDS, AnswerReward
from agentrl.errors import ConfigError
from agentrl.tools.names import Names

_NAMES = Names("reward", "package.module:function", ConfigError)


def reward_function(name: str) -> AnswerReward:
    """The reward of a name, or the function at `package.module:function`.

    Raises:
        ConfigError: there is none, or it does not take a task and an answer.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise _NAMES.unknown(name, REWARDS)
    found = _NAMES.imported(name)
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"{name} is a {type(found).__name__}; name a function of a task and an answer.")
    try:
        inspect.signature(found).bind("task", "answer")
    except TypeError as error:
        raise ConfigError(
            f"{name}: a reward is called with a task and an answer ({error}); mend it."
        ) from None
    return cast(AnswerReward, found)
