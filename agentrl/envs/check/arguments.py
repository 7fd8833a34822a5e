"""Random arguments of tools by their JSON Schema: valid ones, and every kind of invalid ones.

It supports the part of JSON Schema that typed functions produce: types, enums, constants, unions, references,
bounds of numbers and lengths, arrays, objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from agentrl.tools.schema import compile_validator
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

Arguments = dict[str, JSON]

_ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789"
_TRIES = 20
_MAX_DEPTH = 4
_SPAN = 100
WRONG: tuple[JSON, ...] = (None, True, 0, 1.5, "text", ["list"], {"key": "value"})


class _Draw(NamedTuple):
    """The generator and the schema's definitions for drawing one value."""

    rng: random.Random
    definitions: Mapping[str, JSON]


def fitting(schema: ToolSchema, rng: random.Random) -> Arguments | None:
    """Arguments that the schema allows, or None where this generator finds none."""
    validator = compile_validator(schema)
    draw = _Draw(rng, _table(schema.parameters.get("$defs")))
    for _ in range(_TRIES):
        drawn = _object(draw, schema.parameters, 0)
        if validator.is_valid(drawn):
            return drawn
    return None


def wrong_types(schema: ToolSchema, rng: random.Random) -> Iterator[Arguments]:
    """For each parameter, fitting arguments but for that one, which has each wrong type once."""
    validator = compile_validator(schema)
    base = fitting(schema, rng) or {}
    for name in _table(schema.parameters.get("properties")):
        for value in WRONG:
            changed = {**base, name: value}
            if not validator.is_valid(changed):
                yield changed


def with_strings(schema: ToolSchema, rng: random.Random, text: str) -> Arguments:
    """Fitting arguments in which every string parameter is `text`; one of that name where there is none."""
    base = fitting(schema, rng) or {}
    names = [
        name for name, below in _table(schema.parameters.get("properties")).items() if _takes_text(below)
    ]
    return {**base, **dict.fromkeys(names or ["text"], text)}


def with_numbers(schema: ToolSchema, rng: random.Random, number: float) -> Arguments:
    """Fitting arguments in which every parameter is `number`."""
    base = fitting(schema, rng) or {}
    return {**base, **dict.fromkeys(_table(schema.parameters.get("properties")) or ["x"], number)}


def nested(depth: int) -> JSON:
    """Nested lists of this depth."""
    value: JSON = []
    for _ in range(depth):
        value = [value]
    return value


def _table(value: object) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _takes_text(schema: JSON) -> bool:
    below = _table(schema)
    choices = below.get("anyOf")
    inside = choices if isinstance(choices, list) else []
    return (below.get("type") == "string" and "enum" not in below) or any(map(_takes_text, inside))


def _value(draw: _Draw, schema: Mapping[str, JSON], depth: int) -> JSON:
    rng = draw.rng
    if isinstance(reference := schema.get("$ref"), str):
        return _value(draw, _table(draw.definitions.get(reference.rpartition("/")[2])), depth + 1)
    for key in ("enum", "anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and choices:
            chosen = rng.choice(choices)
            return chosen if key == "enum" else _value(draw, _table(chosen), depth + 1)
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "array":
            most = 3 if depth < _MAX_DEPTH else 0
            items = _table(schema.get("items"))
            return [_value(draw, items, depth + 1) for _ in range(_length(rng, schema, "Items", most))]
        case "object":
            return _object(draw, schema, depth)
    return _scalar(rng, schema)


def _scalar(rng: random.Random, schema: Mapping[str, JSON]) -> JSON:
    match schema.get("type"):
        case "string":
            return "".join(rng.choices(_ALPHABET, k=_length(rng, schema, "Length", 12)))
        case "integer" | "number" as kind:
            return _number(rng, schema, is_integer=kind == "integer")
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return rng.choice(("text", 1, True, None))


def _object(draw: _Draw, schema: Mapping[str, JSON], depth: int) -> Arguments:
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    optional = 0.5 if depth < _MAX_DEPTH else 0.0
    return {
        name: _value(draw, _table(below), depth + 1)
        for name, below in _table(schema.get("properties")).items()
        if name in needed or draw.rng.random() < optional
    }


def _length(rng: random.Random, schema: Mapping[str, JSON], what: str, usual: int) -> int:
    low = _bound(schema, f"min{what}", 0)
    return rng.randint(int(low), int(_bound(schema, f"max{what}", low + usual)))


def _number(rng: random.Random, schema: Mapping[str, JSON], *, is_integer: bool) -> float:
    nudge = 1 if is_integer else 1e-6
    low = max(_bound(schema, "minimum", -_SPAN), _bound(schema, "exclusiveMinimum", -_SPAN - nudge) + nudge)
    high = min(
        _bound(schema, "maximum", max(low, 0) + _SPAN),
        _bound(schema, "exclusiveMaximum", max(low, 0) + _SPAN + nudge) - nudge,
    )
    low = min(low, high) if "minimum" in schema or "exclusiveMinimum" in schema else min(low, high - _SPAN)
    return rng.randint(int(low), int(high)) if is_integer else rng.uniform(low, high)


def _bound(schema: Mapping[str, JSON], key: str, otherwise: float) -> float:
    bound = schema.get(key)
    return float(bound) if isinstance(bound, int | float) else otherwise
