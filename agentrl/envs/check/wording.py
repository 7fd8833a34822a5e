"""The words that a verifier looks for, read from its code: what a model could find out by trying.

Strings in the code of `step`, `reward`, `grade` and of each `Reward`, those of functions within them
included. A reward that looks for one of them in the answer pays for saying it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from agentrl.envs.base import BaseEnv

_METHODS = ("reward", "grade", "step")
_OURS = "agentrl."
_LONGEST = 200
_MOST = 64


def verifier_words(env: BaseEnv) -> tuple[str, ...]:
    """The strings in the verifier's code, each once, up to 64; without docstrings."""
    found = (word for function in _functions(env) for word in _strings(function.__code__, function.__doc__))
    words = (word.strip() for word in found)
    return tuple(dict.fromkeys(word for word in words if 0 < len(word) <= _LONGEST))[:_MOST]


def _functions(env: BaseEnv) -> Iterator[FunctionType]:
    for name in _METHODS:
        method = inspect.unwrap(getattr(type(env), name, len))
        # The methods of the base classes are the package's own.
        if isinstance(method, FunctionType) and not method.__module__.startswith(_OURS):
            yield method
    for reward in env.rewards:
        function = inspect.unwrap(reward.function)
        if isinstance(function, FunctionType):
            yield function


def _strings(code: CodeType, documentation: str | None) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str) and constant != documentation:
            yield constant
        elif isinstance(constant, tuple):
            yield from (item for item in constant if isinstance(item, str))
        elif isinstance(constant, CodeType):
            yield from _strings(constant, None)
