"""How functions of slime are found and called."""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TypeAlias

from agentrl import UserError

Function: TypeAlias = Callable[..., object]
"""A function of slime, sync or async; its signature is slime's."""


class Arguments(Namespace):
    """slime's `args`: what was given, and what the run says."""

    reward_key: str | None

    @classmethod
    def of(cls, given: Mapping[str, object] | None, **own: object) -> Arguments:
        """own: what the run says; what was given comes before it."""
        return cls(**{"reward_key": None, **own, **(given or {})})

    def __getattr__(self, name: str) -> object:
        """Called for a name that is not known."""
        raise AttributeError(f"args.{name} is not known here; give its value, args={{{name!r}: ...}}")


def load_function(path: str) -> object:
    """The object at `package.module.name`."""
    module, _, name = path.rpartition(".")
    found: object = getattr(importlib.import_module(module), name)
    return found


def loaded(function: Function | str) -> Function:
    """The function, or the one at a path `package.module.name` or `package.module:name`.

    Raises:
        UserError: there is none.
    """
    if not isinstance(function, str):
        return function
    try:
        found = load_function(function.replace(":", "."))
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"no function {function!r} of slime: {error}; name it `package.module.name`."
        ) from error
    if not callable(found):
        raise UserError(f"{function} is a {type(found).__name__}, not a function.")
    return found


async def called(function: Function, *arguments: object, **more: object) -> object:
    """What it returns, sync or async."""
    returned = function(*arguments, **more)
    return await returned if inspect.isawaitable(returned) else returned
