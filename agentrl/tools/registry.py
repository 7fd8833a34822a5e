"""Names for tools, so that a run file can say `tools = ["python", "calculator"]`.

A package offers tools through the entry point group `agentrl.tools`. They are imported when they are first
asked for.

    [project.entry-points."agentrl.tools"]
    weather = "my_tools:forecast"          # a typed function: the tool itself
    maps = "my_tools:MapsTools"            # a Toolkit, made with the arguments of the run file
    atlas = "my_tools:make_atlas"          # a function that makes either; it is annotated to return it

`package.module:name` names one that nobody registered.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType, MethodType
from typing import TypeAlias, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentrl.errors import UnknownToolError, UserError
from agentrl.tools.base import ToolFunction
from agentrl.tools.names import Names, check_arguments
from agentrl.tools.toolkit import Toolkit

ToolFactory: TypeAlias = Callable[..., ToolFunction | Toolkit]
"""Makes a tool: a class that is a Toolkit, or a function that returns one or a typed function."""

_GROUP = "agentrl.tools"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NAMES = Names("tool", "package.module:name", UnknownToolError)
_registered: dict[str, object] = {}


def register_tool(name: str, thing: ToolFunction | Toolkit | ToolFactory) -> None:
    """Give a tool a name for as long as the program runs. Registering the same name again replaces it.

    thing: a typed function or a Toolkit; or what makes one, and is then called by each make_tool().

    Raises:
        UserError: the name holds other characters than letters, digits, `_`, `.` and `-`, or it is no tool.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"a tool's name is made of letters, digits, `_`, `.` and `-`, got {name!r}.")
    _registered[name] = _checked(name, thing)


def make_tool(name: str, **kwargs: object) -> ToolFunction | Toolkit:
    """A tool by its name, as an environment's `tools` take it.

    Raises:
        UnknownToolError: nothing has that name (the sentence says what has), or its package is broken.
        UserError: it does not take these arguments.
    """
    thing = find_tool(name)
    if isinstance(thing, Toolkit) or is_function(thing):
        if kwargs:
            raise UserError(f"tool `{name}` takes no arguments, got {kwargs}.")
        return thing
    factory = cast(ToolFactory, thing)
    check_arguments(f"tool `{name}`", factory, kwargs)
    fitting = {key: _fitting(name, key, value, _hints(factory)) for key, value in kwargs.items()}
    try:
        made: object = factory(**fitting)
    except (TypeError, ValueError) as error:
        raise UserError(f"tool `{name}` cannot be made of {kwargs}: {error}.") from error
    if not (isinstance(made, Toolkit) or is_function(made)):
        raise UserError(f"tool `{name}` makes {made!r}, which is neither a typed function nor a Toolkit.")
    return made


def tool_names() -> list[str]:
    """Every name that is registered or offered by an installed package, sorted."""
    return sorted({*_registered, *_offered()})


def find_tool(name: str) -> object:
    """What has a name: a typed function, a Toolkit, or what makes one.

    Raises:
        UnknownToolError: nothing has that name, or its package is broken.
    """
    if name in _registered:
        return _registered[name]
    offered = _offered()
    if name in offered:
        return _checked(name, _NAMES.loaded(offered[name]))
    if ":" in name:
        return _checked(name, _NAMES.imported(name))
    raise _NAMES.unknown(name, tool_names())


def is_function(thing: object) -> typing.TypeGuard[ToolFunction]:
    """Whether it is a tool itself: a function that returns a str, or does not say what it returns."""
    if not isinstance(thing, FunctionType | MethodType):
        return False
    return thing.__annotations__.get("return", str) in (str, "str")


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


def _checked(name: str, thing: object) -> object:
    if not (isinstance(thing, Toolkit) or callable(thing)):
        raise UnknownToolError(
            f"`{name}` is {thing!r}, which is no tool; name a typed function, a Toolkit, or what makes one."
        )
    return thing


def _hints(factory: ToolFactory) -> Mapping[str, type[object]]:
    # Of a dataclass, so that each field's words are read where it was written.
    is_class = isinstance(factory, type)
    subject = factory.__init__ if is_class and not dataclasses.is_dataclass(factory) else factory
    try:
        return typing.get_type_hints(subject, include_extras=True)
    except (NameError, TypeError):
        return {}


def _fitting(name: str, key: str, value: object, hints: Mapping[str, type[object]]) -> object:
    """An argument as its type hint has it: a run file's words are checked before the tool is made."""
    try:
        adapter: TypeAdapter[object] = TypeAdapter(hints[key])
    except (KeyError, PydanticUserError):
        # A type that no run file can spell; it is Python that gave this value.
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].lower()
        raise UserError(f"tool `{name}`: `{key}` = {value!r} does not fit: {reason}.") from None
