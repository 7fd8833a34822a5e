"""From a typed function to what a model is told about it, and from a wrong call to one sentence.

Parameters may be str, int, float, bool, None, Literal, list[...], dict[str, ...], a TypedDict, unions of
these, and `Annotated[type, pydantic.Field(ge=..., description=...)]`: exactly what JSON can carry unchanged.
Arguments reach the function as the model wrote them; nothing is coerced.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Union, get_args, get_origin

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from typing_extensions import is_typeddict

from agentrl.errors import ToolDefinitionError, did_you_mean
from agentrl.protocols import ToolSchema
from agentrl.types import JSON

_ALLOWED = "str, int, float, bool, None, Literal, list[...], dict[str, ...], a TypedDict or a union of these"
_SHOWN_CHARACTERS = 80
_ARGUMENT_LINE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_: object, value: object) -> bool:
    return _is_integer(_, value) or (isinstance(value, float) and math.isfinite(value))


_extend: Callable[..., type[Validator]] = extend
# JSON Schema counts 3.0 as an integer and Python's reader lets NaN through; a typed function expects neither.
_StrictValidator = _extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_integer, "number": _is_number}
    ),
)


def compile_validator(schema: ToolSchema) -> Validator:
    """A validator of whole argument objects, to be made once for each tool."""
    return _StrictValidator(schema.parameters)


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


def _is_json_type(hint: object) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (str, int, float, bool, type(None), list, dict):
        return True
    if is_typeddict(hint) and isinstance(hint, type):
        return all(map(_is_json_type, typing.get_type_hints(hint, include_extras=True).values()))
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return _is_json_type(arguments[0])
    if origin is Literal:
        return all(isinstance(value, str | int | bool | None) for value in arguments)
    if origin in (Union, types.UnionType, list):
        return all(map(_is_json_type, arguments))
    return origin is dict and arguments[0] is str and _is_json_type(arguments[1])


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
    said = argument_descriptions(documentation)
    properties: dict[str, JSON] = {}
    for key, parameter in parameters.items():
        schema = dict(schemas[key, "validation"])
        if key in said:
            schema.setdefault("description", said[key])
        if isinstance(parameter.default, str | int | float | list | dict | None):
            schema["default"] = parameter.default
        properties[key] = schema
    required: list[JSON] = [key for key, p in parameters.items() if p.default is p.empty]
    whole: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
    return {**whole, "additionalProperties": False, **shared}


def argument_descriptions(documentation: str) -> dict[str, str]:
    """The entries of a Google-style `Args:` section, continuation lines joined."""
    lines = iter(documentation.splitlines())
    for line in lines:
        if line.strip() in ("Args:", "Arguments:"):
            break
    said: dict[str, str] = {}
    margin, current = 0, ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or not indent:
            break
        margin = margin or indent
        match = _ARGUMENT_LINE.match(line.strip())
        if indent == margin and match:
            current = match[1]
            said[current] = match[2]
        elif current:
            said[current] = f"{said[current]} {line.strip()}".strip()
    return said


def explain(schema: ToolSchema, validator: Validator, arguments: Mapping[str, JSON]) -> str:
    """One sentence for the model: which parameter is wrong, its value, and what is expected."""
    error = best_match(validator.iter_errors(arguments))
    assert error is not None, "explain() is for calls that failed validation"
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    where = f"parameter `{where.lstrip('.')}`"
    if error.validator in ("required", "additionalProperties"):
        return f"{schema.name}: {_wrong_keys(error, error.instance, where if error.absolute_path else '')}"
    if error.validator in ("type", "enum", "const", "anyOf"):
        expected = f"must be {_expected(_schema_of(error))}"
    else:
        expected = f"must satisfy {error.validator} = {_shown(error.validator_value)}"
    return f"{schema.name}: {where} {expected}, but got {_shown(error.instance)}."


def _wrong_keys(error: ValidationError, given: Mapping[str, JSON], where: str) -> str:
    schema = _schema_of(error)
    known = _objects(schema.get("properties"))
    inside = f" in {where}" if where else ""
    if error.validator == "required":
        required = schema["required"]
        assert isinstance(required, list)
        key = next(str(key) for key in required if key not in given)
        return f"parameter `{key}` is missing{inside}; it must be {_expected(known[key])}."
    key = next(key for key in given if key not in known)
    takes = ", ".join(f"`{name}`" for name in known) or "no parameters"
    return (
        f"there is no parameter `{_clip(key)}`{inside} (got {_shown(given[key])}); "
        f"it takes {takes}.{did_you_mean(key, known)}"
    )


def _schema_of(error: ValidationError) -> Mapping[str, JSON]:
    return error.schema if isinstance(error.schema, Mapping) else {}


def _objects(value: JSON) -> dict[str, dict[str, JSON]]:
    table = value if isinstance(value, dict) else {}
    return {key: below for key, below in table.items() if isinstance(below, dict)}


def _expected(schema: Mapping[str, JSON]) -> str:
    if isinstance(choices := schema.get("anyOf"), list):
        return " or ".join(_expected(choice) for choice in choices if isinstance(choice, dict))
    if isinstance(values := schema.get("enum"), list):
        return "one of " + ", ".join(_shown(value) for value in values)
    if "const" in schema:
        return _shown(schema["const"])
    words = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false"}
    words |= {"array": "a list", "object": "an object", "null": "null"}
    return words.get(str(schema.get("type")), "an object")


def _shown(value: JSON) -> str:
    return _clip(json.dumps(value, ensure_ascii=False, default=repr))


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
