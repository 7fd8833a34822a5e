"""What the schema of a tool must satisfy before calls are checked against it.

Schemas of others (MCP servers) are programs that run on every call. Their size, depth and alternatives are
bounded, a part may not lead to itself for the same value, and patterns must run without backtracking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import NoReturn

from jsonschema import Draft202012Validator
from pydantic_core import SchemaError
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

from agentrl.errors import ToolDefinitionError
from agentrl.tools.patterns import compiled, pattern_size
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

MAX_SIZE = 10_000
"""Of one schema; see `schema_size`."""
_MAX_DEPTH = 32
_MAX_IN_PLACE = 32
_MAX_ALTERNATIVES = 128
_CHARACTERS_A_VALUE = 32
_MAX_QUOTED = 200

_ONE = frozenset(
    {"additionalProperties", "propertyNames", "items", "contains", "not", "if", "then", "else"}
    | {"unevaluatedItems", "unevaluatedProperties"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_TABLES = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
_UNSUPPORTED = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$anchor")
_METASCHEMA = Draft202012Validator(Draft202012Validator.META_SCHEMA)

_Part = Mapping[str, JSON]


def check_parameters(schema: ToolSchema) -> None:
    """Check that parameters are a self-contained, bounded JSON Schema of an object, for schemas of others.

    Raises:
        ToolDefinitionError: they are not; the sentence says what to change.
    """
    check_schema(f"tool `{schema.name}`: its parameters", schema.parameters)
    if schema.parameters.get("type", "object") != "object":
        raise ToolDefinitionError(
            f"tool `{schema.name}`: its parameters must be an object, got {schema.parameters['type']!r}"
        )


def check_schema(what: str, schema: Mapping[str, JSON]) -> None:
    """Check that a JSON Schema refers to nothing outside of it, and takes bounded work.

    what: the beginning of the sentence about an error.

    Raises:
        ToolDefinitionError: it does not.
    """
    if schema_size(schema) > MAX_SIZE:
        raise ToolDefinitionError(
            f"{what} have more than {MAX_SIZE:,} values, or nest deeper than {_MAX_DEPTH}; describe less"
        )
    intake = _Intake(what, schema)
    intake.check_keywords()
    intake.check_metaschema()
    intake.check_references()
    intake.check_patterns()


def schema_size(schema: Mapping[str, JSON]) -> int:
    """The number of values of a schema; 32 characters of text count as one. Too deep a schema counts as too
    large.
    """
    size = 0
    pending: list[tuple[JSON, int]] = [(dict(schema), 0)]
    while pending and size <= MAX_SIZE:
        value, depth = pending.pop()
        if depth > _MAX_DEPTH:
            return MAX_SIZE + 1
        size += 1
        if isinstance(value, str):
            size += len(value) // _CHARACTERS_A_VALUE
        elif isinstance(value, dict):
            size += sum(map(len, value)) // _CHARACTERS_A_VALUE
            pending += [(below, depth + 1) for below in value.values()]
        elif isinstance(value, list):
            pending += [(below, depth + 1) for below in value]
    return size


def check_patterns(what: str, schema: Mapping[str, JSON]) -> None:
    """Check that the patterns of a schema run without backtracking.

    Raises:
        ToolDefinitionError: one does not.
    """
    _Intake(what, schema).check_patterns()


def ambiguous_union(schema: Mapping[str, JSON]) -> str | None:
    """The alternatives of one JSON type that all hold their union again; None: no union has several.

    A value is built by trying each alternative, so every level of such a value would double the work.
    """
    return _Intake("", schema).ambiguous_union()


def _below(part: _Part) -> Iterator[tuple[str, _Part]]:
    """The schemas that a schema holds, each with its keyword."""
    for keyword, value in part.items():
        below: list[JSON] = []
        if keyword in _ONE:
            below = [value]
        elif keyword in _LISTS and isinstance(value, list):
            below = value
        elif keyword in _TABLES and isinstance(value, dict):
            below = list(value.values())
        yield from ((keyword, each) for each in below if isinstance(each, dict))


def _patterns(part: _Part) -> Iterator[str]:
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(table := part.get("patternProperties"), dict):
        yield from table


class _Intake:
    """One schema, and all schemas inside of it by their ids."""

    def __init__(self, what: str, schema: _Part) -> None:
        self._what = what
        self._schema = schema
        registry = EMPTY_REGISTRY.with_resource("", DRAFT202012.create_resource(schema))
        self._resolver = registry.resolver()
        self._parts: dict[int, _Part] = {}
        pending = [schema]
        while pending:
            part = pending.pop()
            if id(part) not in self._parts:
                self._parts[id(part)] = part
                pending += [below for _, below in _below(part)]

    def check_keywords(self) -> None:
        """Refuse keywords that change what others mean, and too many alternatives."""
        keywords = {keyword for part in self._parts.values() for keyword in part}
        for part in self._parts.values():
            for keyword in ("$id", "$schema"):
                if keyword in part and part is not self._schema:
                    self._refuse(f"hold `{keyword}` inside; leave it out")
            for keyword in ("required", "type"):
                if not _are_names(part.get(keyword)):
                    self._refuse(f"are no JSON Schema: `{keyword}` must hold names")
            dependent = part.get("dependentRequired")
            if isinstance(dependent, dict) and not all(map(_are_names, dependent.values())):
                self._refuse("are no JSON Schema: `dependentRequired` must hold names")
            for keyword in _LISTS:
                if isinstance(choices := part.get(keyword), list) and len(choices) > _MAX_ALTERNATIVES:
                    self._refuse(f"have {len(choices):,} alternatives; describe at most {_MAX_ALTERNATIVES}")
        for keyword in _UNSUPPORTED:
            if keyword in keywords:
                self._refuse(f"use `{keyword}`, which is not supported; write `$ref` and `$defs`")
        if {"unevaluatedProperties", "patternProperties"} <= keywords:
            self._refuse("use `unevaluatedProperties` and `patternProperties`; use one of them")

    def check_metaschema(self) -> None:
        """Refuse what is no JSON Schema."""
        try:
            error = next(_METASCHEMA.iter_errors(self._schema), None)
        except RecursionError:
            self._refuse("are nested too deep; describe less")
        if error is not None:
            self._refuse(f"are no JSON Schema: {_quoted(error.message)}")

    def check_references(self) -> None:
        """Refuse references to other schemas, and parts that lead to themselves for the same value."""
        graph = {
            key: {id(below) for keyword, below in _below(part) if keyword in _IN_PLACE}
            | {id(target) for target in self._targets(part)}
            for key, part in self._parts.items()
        }
        try:
            order = tuple(TopologicalSorter(graph).static_order())
        except CycleError:
            self._refuse("refer to themselves without going into a property or an item; no value is checked")
        depths: dict[int, int] = {}
        for key in order:
            depths[key] = 1 + max((depths[below] for below in graph[key]), default=0)
        if max(depths.values()) > _MAX_IN_PLACE:
            self._refuse(f"have more than {_MAX_IN_PLACE} references and unions in a row; describe less")

    def check_patterns(self) -> None:
        """Refuse patterns that need backtracking, and too large ones."""
        patterns = {pattern for part in self._parts.values() for pattern in _patterns(part)}
        if sum(map(len, patterns)) > MAX_SIZE or sum(map(pattern_size, patterns)) > MAX_SIZE:
            self._refuse("have patterns that are too large; leave some out, or repeat less in them")
        for pattern in sorted(patterns):
            try:
                compiled(pattern)
            except SchemaError as error:
                reason = str(error).strip().splitlines()[-1].removeprefix("error: ")
                self._refuse(
                    f"have the pattern {_quoted(pattern)}, which cannot run in linear time "
                    f"({_quoted(reason)}); write it without look-around and back-references"
                )

    def ambiguous_union(self) -> str | None:
        """See `ambiguous_union`."""
        edges = {
            key: [*(below for _, below in _below(part)), *self._targets(part)]
            for key, part in self._parts.items()
        }
        for part in self._parts.values():
            choices = part.get("anyOf")
            held: dict[str, list[str]] = {}
            for choice in choices if isinstance(choices, list) else ():
                if isinstance(choice, dict) and self._reaches(choice, part, edges):
                    held.setdefault(self._type(choice), []).append(_name(choice))
            for names in held.values():
                if len(names) > 1:
                    return " and ".join(names)
        return None

    def _reaches(self, start: _Part, goal: _Part, edges: Mapping[int, list[_Part]]) -> bool:
        seen, pending = {id(start)}, [start]
        while pending:
            part = pending.pop()
            if part is goal:
                return True
            new = [below for below in edges[id(part)] if id(below) not in seen]
            seen |= set(map(id, new))
            pending += new
        return False

    def _type(self, part: _Part) -> str:
        targets = self._targets(part)
        return str(part.get("type")) if "type" in part or not targets else self._type(targets[0])

    def _targets(self, part: _Part) -> list[_Part]:
        """What the reference of a part refers to, if it has one."""
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return []
        try:
            target = self._resolver.lookup(reference).contents if reference[:1] == "#" else None
        except (Unresolvable, ValueError, TypeError):  # a pointer into a list, or into a number
            target = None
        if isinstance(target, bool):
            return []
        if not isinstance(target, Mapping) or id(target) not in self._parts:
            name = _quoted(repr(reference))
            self._refuse(f"refer to {name}, which they do not hold; nothing is fetched for a schema")
        return [target]

    def _refuse(self, problem: str) -> NoReturn:
        raise ToolDefinitionError(f"{self._what} {problem}")


def _name(part: _Part) -> str:
    return f"`{_quoted(str(part.get('$ref', part.get('type'))).rpartition('/')[2])}`"


def _are_names(value: JSON) -> bool:
    return not isinstance(value, list) or all(isinstance(name, str) for name in value)


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_QUOTED else f"{line[:_MAX_QUOTED]}..."
