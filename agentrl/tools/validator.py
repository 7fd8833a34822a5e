"""Checks values against JSON Schemas in a bounded number of steps.

The keywords are those of `jsonschema`, under three rules:

    steps      each use of a keyword costs at least one; a check that exceeds its steps is ended
    memory     whether a part of a value fits a part of a schema is decided once, so that unions which hold
               themselves take as many steps as value and schema have pairs, not as many as there are paths
    linear     patterns are run by the engine of pydantic (Rust's regex, without backtracking); members of
               lists and of enums are compared by their canonical text

`agentrl.tools.intake` checks the schemas themselves.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator as SchemaClass
from jsonschema.validators import extend
from referencing.jsonschema import EMPTY_REGISTRY

from agentrl.tools.patterns import compiled, pattern_size
from agentrl.types import JSON

MAX_STEPS = 200_000
"""Of one check: a few seconds. A list of 100,000 numbers takes half of it."""
_FRAMES_A_KEYWORD = 4
# jsonschema's registry is written in Rust: there, the end of the stack is no RecursionError but a panic.
_FRAMES_LEFT = 250
_CHARACTERS_A_STEP = 256
_ENTRIES_A_STEP = 8
_PATTERN_WORK_A_STEP = 512


class OutOfStepsError(Exception):
    """A check exceeded its steps."""


class TooDeepError(OutOfStepsError):
    """A value, or a schema with it, is nested deeper than the stack allows."""


class _Node(Protocol):
    """What keywords use of jsonschema's validator of one part of a schema."""

    def descend(
        self,
        instance: JSON,
        schema: JSON,
        path: str | int | None = None,
        schema_path: str | int | None = None,
    ) -> Iterator[ValidationError]: ...


_Schema = Mapping[str, JSON]
_Keyword = Callable[[_Node, JSON, JSON, _Schema], Iterable[ValidationError] | None]
# These lead to other parts of a schema for the same value: without a memory their paths multiply.
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "pattern"})


class SchemaCheck:
    """The work of one check: the steps that are left, and what is known of parts of the value.

    A part is known by its id. The memory holds the part, too, so that no other object gets that id.
    """

    def __init__(self, root: SchemaClass, steps: int) -> None:
        self._root = root
        self._steps = steps
        self._depth = (sys.getrecursionlimit() - _num_frames() - _FRAMES_LEFT) // _FRAMES_A_KEYWORD
        self._known: dict[tuple[str, int, int], tuple[JSON, bool]] = {}
        self._weights: dict[int, tuple[JSON, int]] = {}
        self._choices: dict[int, tuple[JSON, frozenset[str]]] = {}
        self._is_listing = False

    @property
    def steps_left(self) -> int:
        """The steps that are left."""
        return self._steps

    def spend(self, steps: int) -> None:
        """Count steps.

        Raises:
            OutOfStepsError: none are left.
        """
        self._steps -= steps
        if self._steps < 0:
            raise OutOfStepsError

    def fits(self, value: JSON, schema: JSON | None = None) -> bool:
        """Whether a value fits the schema, or a part of it.

        Raises:
            OutOfStepsError: that takes more steps than are left.
        """
        self.spend(1)
        node = self._root if schema is None else self._root.evolve(schema=schema)
        with self._active():
            return node.is_valid(value)

    def errors(self, value: JSON) -> tuple[list[ValidationError], bool]:
        """The errors of a value, and whether they are all: it ends with the steps."""
        found: list[ValidationError] = []
        self._is_listing = True
        try:
            with self._active():
                found.extend(self._root.iter_errors(value))
        except OutOfStepsError:
            return found, False
        finally:
            self._is_listing = False
        return found, True

    @contextmanager
    def _active(self) -> Iterator[None]:
        token = _CHECK.set(self)
        try:
            yield
        except RecursionError:
            raise TooDeepError from None
        finally:
            _CHECK.reset(token)

    def applied(
        self, name: str, keyword: _Keyword, node: _Node, argument: JSON, value: JSON, schema: _Schema
    ) -> Iterable[ValidationError]:
        """The errors of one keyword: at most one, unless they are listed."""
        self.spend(1 + _length(argument) // _ENTRIES_A_STEP + _length(value) // _ENTRIES_A_STEP)
        key = (name, id(schema), id(value))
        is_known = name in _IN_PLACE or isinstance(value, dict | list)
        error: ValidationError | None = None
        if is_known and key in self._known:
            fits = self._known[key][1]
        else:
            if self._depth <= 0:
                raise TooDeepError
            was_listing, self._is_listing, self._depth = self._is_listing, False, self._depth - 1
            try:
                error = next(iter(keyword(node, argument, value, schema) or ()), None)
            finally:
                self._is_listing, self._depth = was_listing, self._depth + 1
            fits = error is None
            if is_known:
                self._known[key] = (value, fits)
        if fits:
            return ()
        # jsonschema's errors quote the value.
        self.spend(self._weight(value) // _CHARACTERS_A_STEP)
        if self._is_listing:
            return keyword(node, argument, value, schema) or ()
        return (error or ValidationError("it does not fit"),)

    def _weight(self, value: JSON) -> int:
        """About the number of characters of a value as JSON."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, dict | list):
            return 1
        if id(value) not in self._weights:
            below = value.values() if isinstance(value, dict) else value
            keys = sum(map(len, value)) if isinstance(value, dict) else 0
            self._weights[id(value)] = (value, keys + len(value) + sum(map(self._weight, below)))
        return self._weights[id(value)][1]

    def text(self, value: JSON) -> str:
        """The canonical text of a value: equal for equal values of JSON Schema, where 1.0 is 1."""
        self.spend(self._weight(value) // _CHARACTERS_A_STEP)
        return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)

    def choices(self, choices: list[JSON]) -> frozenset[str]:
        """The canonical texts of the values of an enum."""
        if id(choices) not in self._choices:
            self._choices[id(choices)] = (choices, frozenset(map(self.text, choices)))
        return self._choices[id(choices)][1]

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text."""
        self.spend(1 + (len(text) + 1) * pattern_size(pattern) // _PATTERN_WORK_A_STEP)
        return compiled(pattern).isinstance_python(text)


_CHECK: ContextVar[SchemaCheck] = ContextVar("agentrl_check")


def _length(value: JSON) -> int:
    return len(value) if isinstance(value, str | list | dict) else 0


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _num_frames() -> int:
    """The depth of the stack."""
    frame, number = inspect.currentframe(), 0
    while frame is not None:
        frame, number = frame.f_back, number + 1
    return number


def _pattern(node: _Node, pattern: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del node, schema
    if isinstance(value, str) and not _CHECK.get().matches(str(pattern), value):
        yield ValidationError("it does not match")


def _pattern_properties(
    node: _Node, patterns: JSON, value: JSON, schema: _Schema
) -> Iterator[ValidationError]:
    del schema
    if not isinstance(value, dict) or not isinstance(patterns, dict):
        return
    for pattern, below in patterns.items():
        for key in value:
            if _CHECK.get().matches(pattern, key):
                yield from node.descend(value[key], below, path=key, schema_path=pattern)


def _additional_properties(
    node: _Node, additional: JSON, value: JSON, schema: _Schema
) -> Iterator[ValidationError]:
    if not isinstance(value, dict):
        return
    declared, patterns = schema.get("properties"), schema.get("patternProperties")
    names = declared if isinstance(declared, dict) else {}
    others = patterns if isinstance(patterns, dict) else {}
    for key, part in value.items():
        if key in names or any(_CHECK.get().matches(pattern, key) for pattern in others):
            continue
        if additional is False:
            yield ValidationError("it has an undeclared property")
            return
        yield from node.descend(part, additional, path=key)


def _unique_items(node: _Node, unique: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del node, schema
    if unique and isinstance(value, list) and len(set(map(_CHECK.get().text, value))) < len(value):
        yield ValidationError("its members are not unique")


def _enum(node: _Node, choices: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del node, schema
    check = _CHECK.get()
    if isinstance(choices, list) and check.text(value) not in check.choices(choices):
        yield ValidationError("it is none of the values")


def _const(node: _Node, constant: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del node, schema
    if _CHECK.get().text(value) != _CHECK.get().text(constant):
        yield ValidationError("it is another value")


def _one_of(node: _Node, choices: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del schema
    context: list[ValidationError] = []
    num_fitting = 0
    for index, choice in enumerate(choices if isinstance(choices, list) else ()):
        errors = list(node.descend(value, choice, schema_path=index))
        context += errors
        num_fitting += not errors
    if num_fitting != 1:
        yield ValidationError(f"it fits {num_fitting} schemas", context=() if num_fitting else context)


def _not(node: _Node, excluded: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del schema
    if next(node.descend(value, excluded), None) is None:
        yield ValidationError("it is excluded")


def _multiple_of(node: _Node, divisor: JSON, value: JSON, schema: _Schema) -> Iterator[ValidationError]:
    del node, schema
    if not _is_number(None, value) or not _is_number(None, divisor):
        return
    assert isinstance(value, int | float)
    assert isinstance(divisor, int | float)
    try:
        quotient = value / divisor
    except OverflowError:
        quotient = math.inf
    if isinstance(value, int) and isinstance(divisor, int):
        is_multiple = value % divisor == 0
    elif math.isinf(quotient):  # beyond floats
        is_multiple = (Fraction(value) / Fraction(divisor)).denominator == 1
    else:
        is_multiple = quotient.is_integer()
    if not is_multiple:
        yield ValidationError("it is no multiple")


_OURS: Mapping[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "enum": _enum,
    "const": _const,
    "oneOf": _one_of,
    "not": _not,
    "multipleOf": _multiple_of,
}


def _bounded(name: str, keyword: _Keyword) -> _Keyword:
    def bounded(
        node: _Node, argument: JSON, value: JSON, schema: _Schema
    ) -> Iterable[ValidationError] | None:
        return _CHECK.get().applied(name, keyword, node, argument, value, schema)

    return bounded


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(_: object, value: object) -> bool:
    return _is_integer(_, value) or (isinstance(value, float) and math.isfinite(value))


_extend: Callable[..., type[SchemaClass]] = extend
# JSON Schema counts 3.0 as an integer and Python's json accepts NaN; a typed function expects neither.
_STRICT = _extend(
    Draft202012Validator,
    validators={
        name: _bounded(name, keyword)
        for name, keyword in {**Draft202012Validator.VALIDATORS, **_OURS}.items()
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"integer": _is_integer, "number": _is_number}
    ),
)


class Validator:
    """A schema against which many values are checked."""

    def __init__(self, parameters: Mapping[str, JSON]) -> None:
        # jsonschema would switch to the class of another dialect, which knows no bounds.
        schema = {key: value for key, value in parameters.items() if key != "$schema"}
        # With an empty registry: otherwise jsonschema fetches the references of a schema over the network.
        self._root = _STRICT(schema, registry=EMPTY_REGISTRY)

    def check(self, steps: int = MAX_STEPS) -> SchemaCheck:
        """A check of one value and its parts."""
        return SchemaCheck(self._root, steps)

    def is_valid(self, value: JSON) -> bool:
        """Whether a value fits.

        Raises:
            OutOfStepsError: that takes more than MAX_STEPS.
        """
        return self.check().fits(value)
