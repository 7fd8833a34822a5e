"""Calls of simple tools that surely fit their schema, found in a hundredth of the time of `jsonschema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.types import JSON

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_SILENT = {"title", "description", "default"}
"""Keywords that no value can violate."""
_OBJECT = _SILENT | {"type", "properties", "required", "additionalProperties"}


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """Parameters of which the schema says their types alone. types: the Python types of each."""

    types: Mapping[str, tuple[type, ...]]
    required: frozenset[str]

    @classmethod
    def of(cls, parameters: Mapping[str, JSON]) -> PlainParameters | None:
        """The same parameters, or None where the schema says more of them."""
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        if parameters.get("type") != "object" or not parameters.keys() <= _OBJECT:
            return None
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        types: dict[str, tuple[type, ...]] = {}
        for name, schema in properties.items():
            if not isinstance(schema, dict) or not schema.keys() <= _SILENT | {"type"}:
                return None
            kind = schema.get("type")
            if not isinstance(kind, str) or kind not in _TYPES:
                return None
            types[name] = _TYPES[kind]
        return cls(types, frozenset(map(str, required)))

    def surely_fit(self, values: Mapping[str, JSON]) -> bool:
        """Whether values fit; False where only the schema itself can tell."""
        if not self.required <= values.keys():
            return False
        types = self.types
        return all(name in types and type(value) in types[name] for name, value in values.items())
