"""From a typed function to the schema that a model reads.

Parameters may be str, int, float, bool, None, Literal, list[...], dict[str, ...], a TypedDict, an Enum, a
dataclass, a pydantic model, unions of these, and `Annotated[type, pydantic.Field(ge=..., description=...)]`:

    class Unit(StrEnum):
        CELSIUS = "celsius"
        KELVIN = "kelvin"

    class Place(pydantic.BaseModel):
        city: str
        country: str | None = None

    def forecast(places: list[Place], unit: Unit = Unit.CELSIUS) -> str:
        '''Tomorrow's temperature.'''

The model sees the values of an Enum and the fields of a dataclass or a pydantic model; the function
receives the member and the instance. All else arrives as the model wrote it. Objects accept no undeclared
fields, unless a pydantic model sets `extra="allow"`.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Annotated, Literal, Union, get_args, get_origin

from docstring_parser import ParseError, parse
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, SchemaError, to_jsonable_python
from typing_extensions import is_typeddict

from agentrl.errors import ToolDefinitionError
from agentrl.tools.intake import ambiguous_union, check_patterns
from agentrl.tools.json_text import NO_TEXT
from agentrl.tools.validator import Validator
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

_ALLOWED = (
    "str, int, float, bool, None, Literal, list[...], dict[str, ...], a TypedDict, an Enum of such values, a "
    "dataclass, a pydantic model or a union of these"
)


def compile_validator(schema: ToolSchema) -> Validator:
    """A validator of argument objects, to be compiled once for each tool."""
    return Validator(schema.parameters)


def describe(
    function: Callable[..., object], *, name: str | None = None, description: str | None = None
) -> ToolSchema:
    """The schema of a function or bound method, from its signature and its docstring.

    The description is the docstring's first paragraph. Parameters are described in it, in Google's,
    numpy's or Sphinx's style, by `Annotated[..., "a description"]`, or by `pydantic.Field(description=...)`.

    Raises:
        ToolDefinitionError: a hint or the docstring is missing, a type is not JSON's, or a pattern cannot
            run in linear time.
    """
    name = name or function.__name__
    documentation = inspect.getdoc(function) or ""
    description = description or " ".join(documentation.split("\n\n")[0].split())
    if not description:
        raise ToolDefinitionError(
            f"tool `{name}` has no docstring; write one sentence that tells the model what it does"
        )
    parameters = inspect.signature(function).parameters
    hints = _hints(function, name)
    for parameter in parameters.values():
        _check_parameter(name, parameter, hints)
    schema = _object_schema(name, parameters, hints, documentation)
    check_patterns(f"tool `{name}`: its parameters", schema)
    return ToolSchema(name, description, schema)


def _hints(function: Callable[..., object], name: str) -> dict[str, type[object]]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            f"tool `{name}`: a type hint cannot be resolved ({error}); import the type at module level"
        ) from error
    if hints.get("return") in NO_TEXT:
        raise ToolDefinitionError(
            f"tool `{name}` is annotated to return {hints['return']!r}, which is no text for the model; "
            "return text, or a value that JSON can hold"
        )
    return hints


def _check_parameter(name: str, parameter: inspect.Parameter, hints: Mapping[str, type[object]]) -> None:
    where = f"tool `{name}`, parameter `{parameter.name}`"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ToolDefinitionError(
            f"{where} is {parameter.kind.description}, which a model cannot be told about; "
            "give every parameter a name and a type"
        )
    if parameter.name not in hints:
        raise ToolDefinitionError(
            f"{where} has no type hint; write `{parameter.name}: str` or another of {_ALLOWED}"
        )
    if not _is_json_type(hints[parameter.name]):
        raise ToolDefinitionError(f"{where} has the type {hints[parameter.name]!r}; use {_ALLOWED}")


def _fields(hint: object) -> tuple[object, ...] | None:
    """The types of the fields of a TypedDict, a dataclass or a pydantic model; None for anything else."""
    if not isinstance(hint, type):
        return None
    if issubclass(hint, BaseModel):
        return tuple(field.annotation for field in hint.model_fields.values())
    if is_typeddict(hint) or dataclasses.is_dataclass(hint):
        return tuple(typing.get_type_hints(hint, include_extras=True).values())
    return None


def _is_json_type(hint: object, inside: tuple[object, ...] = ()) -> bool:
    origin = get_origin(hint)
    arguments: tuple[object, ...] | None = get_args(hint)
    if hint in (str, int, float, bool, type(None), list, dict, *inside):
        return True
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _are_json(member.value for member in hint)
    if origin is Literal:
        return _are_json(get_args(hint))
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return _is_json_type(get_args(hint)[0], inside)
    if origin is dict:
        key, below = get_args(hint)
        return key is str and _is_json_type(below, inside)
    if origin not in (Union, types.UnionType, list):
        arguments, inside = _fields(hint), (*inside, hint)
    return arguments is not None and all(_is_json_type(below, inside) for below in arguments)


def _are_json(values: Iterable[object]) -> bool:
    return all(isinstance(value, str | int | float | None) for value in values)


def _is_built(hint: object, inside: tuple[object, ...] = ()) -> bool:
    """Whether an instance must be built from the JSON that the model writes."""
    if hint in inside:
        return False
    if isinstance(hint, type) and not is_typeddict(hint):
        return issubclass(hint, Enum | BaseModel) or dataclasses.is_dataclass(hint)
    return any(_is_built(below, (*inside, hint)) for below in _fields(hint) or get_args(hint))


def builders(function: Callable[..., object], schema: ToolSchema) -> dict[str, TypeAdapter[object]]:
    """Adapters that build arguments from JSON, by parameter, for the parameters that are not plain JSON.

    schema: of the function.

    Raises:
        ToolDefinitionError: building could take time that doubles with every level of a value.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    built = {key: TypeAdapter(hint) for key, hint in hints.items() if key != "return" and _is_built(hint)}
    if built and (names := ambiguous_union(schema.parameters)):
        raise ToolDefinitionError(
            f"tool `{schema.name}`: {names} hold the union that they are in, and each would be tried at "
            "every level of a value; give the union a discriminator, "
            '`Annotated[A | B, pydantic.Field(discriminator="kind")]`'
        )
    return built


def _object_schema(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    hints: Mapping[str, type[object]],
    documentation: str,
) -> dict[str, JSON]:
    try:
        adapters = {key: TypeAdapter(hints[key]) for key in parameters}
        schemas, shared = TypeAdapter.json_schemas(
            [(key, "validation", adapter) for key, adapter in adapters.items()]
        )
    except PydanticUserError as error:
        raise ToolDefinitionError(
            f"tool `{name}`: pydantic cannot describe a parameter: {error.message}"
        ) from error
    except SchemaError as error:
        reason = " ".join(str(error).split())
        raise ToolDefinitionError(f"tool `{name}`: a type cannot be checked: {reason}") from error
    descriptions = argument_descriptions(documentation)
    properties: dict[str, JSON] = {}
    for key, parameter in parameters.items():
        schema = dict(schemas[key, "validation"])
        if description := descriptions.get(key) or _annotated(hints[key]):
            schema.setdefault("description", description)
        if parameter.default is not parameter.empty:
            # A default that is not JSON is left out of the schema: the model need not write it.
            with suppress(PydanticSerializationError):
                schema["default"] = to_jsonable_python(parameter.default)
        properties[key] = schema
    required: list[JSON] = [key for key, p in parameters.items() if p.default is p.empty]
    arguments: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
    return {**arguments, "additionalProperties": False, **_closed(shared)}


def _closed(shared: dict[str, JSON]) -> dict[str, JSON]:
    """The same definitions, each closed to undeclared fields unless it allows them itself.

    pydantic ignores unknown fields: a misspelt field would be dropped silently.
    """
    tables = shared.get("$defs")
    if not isinstance(tables, dict):
        return shared
    closed: dict[str, JSON] = {
        name: {"additionalProperties": False, **table}
        if isinstance(table, dict) and "properties" in table
        else table
        for name, table in tables.items()
    }
    return {**shared, "$defs": closed}


def argument_descriptions(documentation: str) -> dict[str, str]:
    """What a docstring says of each parameter, in the style of Google, numpy or Sphinx."""
    try:
        parsed = parse(documentation).params
    except ParseError:
        return {}
    texts = {each.arg_name: " ".join((each.description or "").split()) for each in parsed}
    # numpy describes several at once: `a, b : int`.
    return {name.strip(" *"): text for names, text in texts.items() for name in names.split(",")}


def _annotated(hint: object) -> str | None:
    """The description in `Annotated[..., "a description"]`."""
    return next((text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)), None)
