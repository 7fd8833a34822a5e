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
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Annotated, Literal, Union, get_args, get_origin

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY
from typing_extensions import is_typeddict

from agentrl.errors import ToolDefinitionError
from agentrl.protocols import ToolSchema
from agentrl.types import JSON

_ALLOWED = (
    "str, int, float, bool, None, Literal, list[...], dict[str, ...], a TypedDict, an Enum of such values, a "
    "dataclass, a pydantic model or a union of these"
)
_ARGUMENT_LINE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_: object, value: object) -> bool:
    return _is_integer(_, value) or (isinstance(value, float) and math.isfinite(value))


_extend: Callable[..., type[Validator]] = extend
# JSON Schema counts 3.0 as an integer and Python's json accepts NaN; a typed function expects neither.
_StrictValidator = _extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_integer, "number": _is_number}
    ),
)


def compile_validator(schema: ToolSchema) -> Validator:
    """A validator of argument objects, to be compiled once for each tool."""
    # With an empty registry: otherwise jsonschema fetches the references of a schema over the network.
    return _StrictValidator(schema.parameters, registry=EMPTY_REGISTRY)


def check_parameters(schema: ToolSchema) -> None:
    """Check that parameters are a self-contained JSON Schema of an object, for schemas of others.

    Raises:
        ToolDefinitionError: they are not.
    """
    try:
        Draft202012Validator.check_schema(schema.parameters)
    except SchemaError as error:
        raise ToolDefinitionError(
            f"tool `{schema.name}`: its parameters are no JSON Schema: {error.message}"
        ) from None
    if schema.parameters.get("type", "object") != "object":
        raise ToolDefinitionError(
            f"tool `{schema.name}`: its parameters must be an object, got {schema.parameters['type']!r}"
        )
    resolver = EMPTY_REGISTRY.with_resource("", DRAFT202012.create_resource(schema.parameters)).resolver()
    for reference in _references(schema.parameters):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ToolDefinitionError(
                f"tool `{schema.name}`: its parameters refer to {reference!r}, which they do not hold; "
                "nothing is fetched for a schema"
            ) from None


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key in ("$ref", "$dynamicRef"):
            if isinstance(reference := schema.get(key), str):
                yield reference
    below = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for child in below:
        yield from _references(child)


def describe(
    function: Callable[..., object], *, name: str | None = None, description: str | None = None
) -> ToolSchema:
    """The schema of a function or bound method, from its signature and its docstring.

    The description is the docstring's first paragraph; parameters are described in a Google-style
    `Args:` section or by `pydantic.Field(description=...)`.

    Raises:
        ToolDefinitionError: a hint or the docstring is missing, or a type is not JSON's.
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
    return ToolSchema(name, description, _object_schema(name, parameters, hints, documentation))


def _hints(function: Callable[..., object], name: str) -> dict[str, type[object]]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(
            f"tool `{name}`: a type hint cannot be resolved ({error}); import the type at module level"
        ) from error
    if hints.get("return", str) is not str:
        raise ToolDefinitionError(
            f"tool `{name}` is annotated to return {hints['return']!r}; let it return the text for the "
            "model, `-> str`"
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


def builders(function: Callable[..., object]) -> dict[str, TypeAdapter[object]]:
    """Adapters that build arguments from JSON, by parameter, for the parameters that are not plain JSON."""
    hints = typing.get_type_hints(function, include_extras=True)
    return {key: TypeAdapter(hint) for key, hint in hints.items() if key != "return" and _is_built(hint)}


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
    descriptions = argument_descriptions(documentation)
    properties: dict[str, JSON] = {}
    for key, parameter in parameters.items():
        schema = dict(schemas[key, "validation"])
        if key in descriptions:
            schema.setdefault("description", descriptions[key])
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
    """The entries of a Google-style `Args:` section, continuation lines joined."""
    lines = iter(documentation.splitlines())
    for line in lines:
        if line.strip() in ("Args:", "Arguments:"):
            break
    descriptions: dict[str, str] = {}
    margin, current = 0, ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or not indent:
            break
        margin = margin or indent
        match = _ARGUMENT_LINE.match(line.strip())
        if indent == margin and match:
            current = match[1]
            descriptions[current] = match[2]
        elif current:
            descriptions[current] = f"{descriptions[current]} {line.strip()}".strip()
    return descriptions
