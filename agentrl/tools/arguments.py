"""From arguments that a model wrote to those that a function receives, or to one sentence about the error.

A call's arguments are checked against the tool's schema by `jsonschema`. Then enums, dataclasses and
pydantic models are built from them; everything else reaches the function as the model wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from pydantic import ConfigDict, TypeAdapter
from pydantic import ValidationError as BuildError

from agentrl.errors import ToolRejected, did_you_mean
from agentrl.protocols import ToolSchema
from agentrl.tools.json_text import read_json
from agentrl.tools.plain import PlainParameters
from agentrl.types import JSON

ArgumentPolicy = Literal["strict", "coerce"]
_MAX_CHARACTERS = 80


class ArgumentsRejected(ToolRejected):
    """The arguments do not fit the schema. kind: the JSON Schema keyword that they violate.

    Where they fit the schema and a validator of a pydantic model rejects them, the kind is `value`.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """Arguments as the function takes them. coerced: values were converted to fit the schema."""

    values: Mapping[str, object]
    coerced: bool = False


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the calls of one tool. builders: adapters of the parameters that are not plain JSON."""

    schema: ToolSchema
    validator: Validator
    builders: Mapping[str, TypeAdapter[object]]
    _plain: PlainParameters | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_plain", PlainParameters.of(self.schema.parameters))

    def read(self, arguments: Mapping[str, JSON], policy: ArgumentPolicy = "strict") -> Reading:
        """Check arguments and build those that the function takes; `coerce` converts values that do not fit.

        `coerced` lists the conversions.

        Raises:
            ArgumentsRejected: they do not fit; the sentence names the parameter.
        """
        values = dict(arguments)
        fits, converted = self._fits(values), False
        if not fits and policy == "coerce":
            values, converted = coerced(values, self.schema.parameters, self.validator), True
            fits = self.validator.is_valid(values)
        if not fits:
            # The text shows the model its own arguments, not the converted ones.
            raise ArgumentsRejected(*explain(self.schema, self.validator, dict(arguments)))
        if not self.builders:
            return Reading(values, converted)
        return Reading({key: self._built(key, value) for key, value in values.items()}, converted)

    def _fits(self, values: Mapping[str, JSON]) -> bool:
        return (self._plain is not None and self._plain.surely_fit(values)) or self.validator.is_valid(values)

    def _built(self, key: str, value: JSON) -> object:
        if key not in self.builders:
            return value
        try:
            return self.builders[key].validate_json(json.dumps(value), strict=True)
        except BuildError as error:
            first = error.errors(include_url=False)[0]
            where = _dotted((key, *first["loc"]))
            problem = f"{_clip(' '.join(first['msg'].split()))}; it got {_as_json(first['input'])}."
            sentence = f"{self.schema.name}: parameter `{where}` does not fit: {problem}"
            raise ArgumentsRejected(sentence, "value") from None


def explain(schema: ToolSchema, validator: Validator, arguments: Mapping[str, JSON]) -> tuple[str, str]:
    """One sentence for the model (which parameter is wrong, its value, what is expected), and its kind."""
    error = best_match(validator.iter_errors(arguments))
    assert error is not None, "only calls that failed validation are explained"
    kind = str(error.validator)
    where = f"parameter `{_dotted(tuple(error.absolute_path))}`" if error.absolute_path else "what it takes"
    if kind in ("required", "additionalProperties"):
        place = _FailedSchema(schema, error)
        problem = place.wrong_keys(error.instance, where if error.absolute_path else "")
        return f"{schema.name}: {problem}", kind
    phrase = _FailedSchema(schema, error).expected(error.schema) if kind in _DESCRIBED_KEYWORDS else ""
    expected = f"must be {phrase}" if phrase else f"must satisfy {kind} = {_as_json(error.validator_value)}"
    if error.validator is None:  # the schema `false`
        kind, expected = "false", "must be left out"
    return f"{schema.name}: {where} {expected}, but got {_as_json(error.instance)}.", kind


class _FailedSchema:
    """The part of a schema that an argument violates."""

    def __init__(self, schema: ToolSchema, error: ValidationError) -> None:
        older = _objects(schema.parameters.get("definitions"))
        self._shared = {**older, **_objects(schema.parameters.get("$defs"))}
        self._error = error
        self._schema: Mapping[str, JSON] = error.schema if isinstance(error.schema, Mapping) else {}

    def wrong_keys(self, value: Mapping[str, JSON], where: str) -> str:
        properties = _objects(self._schema.get("properties"))
        inside = f" in {where}" if where else ""
        if self._error.validator == "required":
            required = self._schema["required"]
            assert isinstance(required, list)
            key = next(str(key) for key in required if key not in value)
            phrase = self.expected(properties.get(key))
            return f"parameter `{key}` is missing{inside}{f'; it must be {phrase}' if phrase else ''}."
        key = next(key for key in value if key not in properties)
        takes = ", ".join(f"`{name}`" for name in properties) or "no parameters"
        return (
            f"there is no parameter `{_clip(key)}`{inside} (got {_as_json(value[key])}); "
            f"it takes {takes}.{did_you_mean(key, properties)}"
        )

    def expected(self, schema: JSON) -> str:
        """A schema as an English phrase; empty where only the schema itself would be exact."""
        if not isinstance(schema, dict):
            return ""
        if isinstance(reference := schema.get("$ref"), str):
            return self.expected(self._shared.get(reference.rpartition("/")[2], {}))
        if isinstance(choices := schema.get("anyOf"), list):
            phrases = [self.expected(choice) for choice in choices]
            return " or ".join(phrases) if all(phrases) else ""
        if isinstance(values := schema.get("enum"), list):
            return "one of " + ", ".join(_as_json(value) for value in values)
        if "const" in schema:
            return _as_json(schema["const"])
        kinds = schema.get("type", "object" if "properties" in schema else None)
        return " or ".join(
            _TYPE_NAMES.get(str(kind), "") for kind in (kinds if isinstance(kinds, list) else [kinds])
        )


_DESCRIBED_KEYWORDS = ("type", "enum", "const", "anyOf")
_TYPE_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _dotted(path: tuple[str | int, ...]) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return _clip(where.lstrip("."))


def _objects(value: JSON) -> dict[str, dict[str, JSON]]:
    table = value if isinstance(value, dict) else {}
    return {key: below for key, below in table.items() if isinstance(below, dict)}


def _as_json(value: object) -> str:
    return _clip(json.dumps(value, ensure_ascii=False, default=repr))


def _clip(text: str) -> str:
    # Text of the model must not break the sentence that quotes it.
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: _MAX_CHARACTERS + 1])
    # Escapes make a short text long.
    return printable if len(printable) <= _MAX_CHARACTERS else f"{printable[:_MAX_CHARACTERS]}..."


_MAX_DEPTH = 32
_LAX: dict[str, TypeAdapter[int] | TypeAdapter[float] | TypeAdapter[bool] | TypeAdapter[str]] = {
    "integer": TypeAdapter(int),
    "number": TypeAdapter(float),
    "boolean": TypeAdapter(bool),
    "string": TypeAdapter(str, config=ConfigDict(coerce_numbers_to_str=True)),
}
_CONTAINERS: dict[str, type[object]] = {"array": list, "object": dict}


def coerced(
    arguments: Mapping[str, JSON], parameters: Mapping[str, JSON], validator: Validator
) -> dict[str, JSON]:
    """The arguments with every value that does not fit its schema converted, where it can be.

    A value that fits is never changed. A value that does not fit is converted by the type in the schema:

        integer    what pydantic's lax mode reads: "5", "5.0" and 5.0 give 5; true gives 1; 5.5 stays
        number     likewise: "2.5" gives 2.5; true gives 1.0
        boolean    likewise: "true", "yes", "on", "1", 1 give true, and their opposites false, in any case
        string     likewise: the digits of a number; 5 gives "5"
        list       the list that a string holds as JSON, or else a list with the value as its only member
        object     the object that a string holds as JSON

    Members of lists and fields of objects are converted in the same way. Of several types (`anyOf`) the
    first that the converted value fits is taken. null, enums of several types, missing and unknown
    parameters stay as they are. The result may still not fit.

    parameters: the schema of the whole object, and `validator`, the one compiled from it.
    """
    schema = dict(parameters)
    converted = _Coercion(schema, validator).value(dict(arguments), schema, 0)
    return converted if isinstance(converted, dict) else dict(arguments)


class _Coercion:
    def __init__(self, parameters: Mapping[str, JSON], validator: Validator) -> None:
        self._validator = validator
        shared = parameters.get("$defs")
        self._shared: Mapping[str, JSON] = shared if isinstance(shared, dict) else {}

    def value(self, value: JSON, schema: JSON, depth: int) -> JSON:
        if value is None or not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return value
        if self._fits(value, schema):
            return value
        if isinstance(reference := schema.get("$ref"), str):
            return self.value(value, self._shared.get(reference.rpartition("/")[2]), depth + 1)
        if isinstance(choices := schema.get("anyOf"), list):
            tries = (self.value(value, choice, depth + 1) for choice in choices)
            fitting = (
                tried for tried, choice in zip(tries, choices, strict=True) if self._fits(tried, choice)
            )
            return next(fitting, value)
        kind = str(schema.get("type"))
        if kind in _LAX:
            return _lax(value, kind)
        return self._container(value, schema, kind, depth) if kind in _CONTAINERS else value

    def _container(self, value: JSON, schema: dict[str, JSON], kind: str, depth: int) -> JSON:
        if isinstance(value, str):
            value = _parsed(value, _CONTAINERS[kind])
        if kind == "array":
            members = value if isinstance(value, list) else [value]
            return [self.value(member, schema.get("items"), depth + 1) for member in members]
        if not isinstance(value, dict):
            return value
        fields = schema.get("properties")
        properties = fields if isinstance(fields, dict) else {}
        others = schema.get("additionalProperties")
        return {
            key: self.value(below, properties.get(key, others), depth + 1) for key, below in value.items()
        }

    def _fits(self, value: JSON, schema: JSON) -> bool:
        return self._validator.evolve(schema=schema).is_valid(value)


def _lax(value: JSON, kind: str) -> JSON:
    try:
        return _LAX[kind].validate_python(value, strict=False)
    except BuildError:
        return value


def _parsed(text: str, kind: type[object]) -> JSON:
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, kind) else text
