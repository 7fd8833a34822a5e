"""Mending arguments that are right in meaning and wrong in type, as the schema asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jsonschema.protocols import Validator
from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentrl.types import JSON

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

    A value that fits is never touched. One that does not becomes, by the type the schema asks for,

        integer    what pydantic's lax mode reads: "5", "5.0" and 5.0 give 5; true gives 1; 5.5 stays
        number     likewise: "2.5" gives 2.5; true gives 1.0
        boolean    likewise: "true", "yes", "on", "1", 1 give true, and their opposites false, in any case
        string     likewise: the digits of a number; 5 gives "5"
        list       the list that a string spells in JSON, or else a list with the value as its one member
        object     the object that a string spells in JSON

    Members of lists and fields of objects are mended in the same way. Of several types (`anyOf`) the
    first in which the mended value fits is taken. null, enums of several types, missing and unknown
    parameters are left as they are. The result may still not fit.

    parameters: the schema of the whole object, and `validator`, the one compiled from it.
    """
    schema = dict(parameters)
    mended = _Mender(schema, validator).value(dict(arguments), schema, 0)
    return mended if isinstance(mended, dict) else dict(arguments)


class _Mender:
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
            value = _spelt(value, _CONTAINERS[kind])
        if kind == "array":
            members = value if isinstance(value, list) else [value]
            return [self.value(member, schema.get("items"), depth + 1) for member in members]
        if not isinstance(value, dict):
            return value
        fields = schema.get("properties")
        known = fields if isinstance(fields, dict) else {}
        others = schema.get("additionalProperties")
        return {key: self.value(below, known.get(key, others), depth + 1) for key, below in value.items()}

    def _fits(self, value: JSON, schema: JSON) -> bool:
        return self._validator.evolve(schema=schema).is_valid(value)


def _lax(value: JSON, kind: str) -> JSON:
    try:
        return _LAX[kind].validate_python(value, strict=False)
    except ValidationError:
        return value


def _spelt(text: str, kind: type[object]) -> JSON:
    try:
        found: JSON = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, kind) else text
