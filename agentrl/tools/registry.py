"""Names for tools, so that a run file can list `tools = ["python", "calculator"]`.

A package offers tools through the entry point group `agentrl.tools`. They are imported at their first use.

    [project.entry-points."agentrl.tools"]
    weather = "my_tools:forecast"          # a typed function: the tool itself
    maps = "my_tools:MapsTools"            # a Toolkit, created with the arguments of the run file
    atlas = "my_tools:make_atlas"          # a function that returns either, annotated so

`package.module:name` names a tool that is not registered.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType, MethodType, NoneType, UnionType
from typing import TypeAlias, cast

from agentrl.errors import UnknownToolError, UserError
from agentrl.tools.base import ToolFunction
from agentrl.tools.names import Names, fitted_arguments
from agentrl.tools.secrets import OF_SERVERS, with_secrets
from agentrl.tools.toolkit import Toolkit
from agentrl.types import JSON

ToolFactory: TypeAlias = Callable[..., ToolFunction | Toolkit]
"""Creates a tool: a subclass of Toolkit, or a function that returns a Toolkit or a typed function."""

_GROUP = "agentrl.tools"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NAMES = Names("tool", "package.module:name", UnknownToolError)
_PLAIN = (str, "str", int, float, bool, NoneType, list, tuple, dict, Sequence, Mapping, JSON)
"""What a typed function may be annotated to return: one that returns something else makes tools."""
_registered: dict[str, object] = {}


def register_tool(name: str, target: ToolFunction | Toolkit | ToolFactory) -> None:
    """Register a tool under a name, for this process. Registering the same name again replaces it.

    target: a typed function, a Toolkit, or a ToolFactory, which each make_tool() then calls.

    Raises:
        UserError: the name holds other characters than letters, digits, `_`, `.` and `-`.
        UnknownToolError: the target is no tool.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"a tool's name is made of letters, digits, `_`, `.` and `-`, got {name!r}.")
    _registered[name] = _checked(name, target)


def make_tool(name: str, /, **kwargs: object) -> ToolFunction | Toolkit:
    """A tool by its name, as an environment's `tools` take it.

    Raises:
        UnknownToolError: no tool has that name (the sentence lists the names), or its package is broken.
        UserError: it does not take these arguments.
    """
    target = find_tool(name)
    if isinstance(target, Toolkit) or is_function(target):
        if kwargs:
            raise UserError(f"tool `{name}` takes no arguments, got {kwargs}.")
        return target
    factory = cast(ToolFactory, target)
    arguments = fitted_arguments(f"tool `{name}`", factory, kwargs)
    try:
        tool: object = factory(**with_secrets(arguments, but=OF_SERVERS))
    except (TypeError, ValueError) as error:
        raise UserError(f"tool `{name}` cannot be made of {kwargs}: {error}.") from error
    if not (isinstance(tool, Toolkit) or is_function(tool)):
        raise UserError(f"tool `{name}` makes {tool!r}, which is neither a typed function nor a Toolkit.")
    return tool


def tool_names() -> list[str]:
    """Every name that is registered or offered by an installed package, sorted."""
    return sorted({*_registered, *_offered()})


def find_tool(name: str) -> object:
    """The target of a name: a typed function, a Toolkit, or a ToolFactory.

    Raises:
        UnknownToolError: no tool has that name, or its package is broken.
    """
    if name in _registered:
        return _registered[name]
    offered = _offered()
    if name in offered:
        return _checked(name, _NAMES.loaded(offered[name]))
    if ":" in name:
        return _checked(name, _NAMES.imported(name))
    raise _NAMES.unknown(name, tool_names())


def is_function(target: object) -> typing.TypeGuard[ToolFunction]:
    """Whether a target is a typed function: it is annotated to return plain data, or not annotated."""
    if not isinstance(target, FunctionType | MethodType):
        return False
    try:
        returned = typing.get_type_hints(target).get("return", str)
    except (NameError, TypeError):
        # A type that cannot be imported here.
        returned = target.__annotations__.get("return", str)
    is_union = typing.get_origin(returned) in (typing.Union, UnionType)
    alternatives = typing.get_args(returned) if is_union else (returned,)
    return all((typing.get_origin(each) or each) in _PLAIN for each in alternatives)


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _checked(name: str, target: object) -> object:
    if not (isinstance(target, Toolkit) or callable(target)):
        raise UnknownToolError(
            f"`{name}` is {target!r}, which is no tool; name a typed function, a Toolkit, or what makes one."
        )
    return target
