"""A check takes a bounded number of steps, whatever schema and arguments are, and agrees with jsonschema."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import Field

from agentrl.errors import StageError, ToolDefinitionError
from agentrl.runtime.stage import stage
from agentrl.tools import ArgumentsRejected, Tool, arguments
from agentrl.tools.arguments import UNION_LEVELS
from agentrl.tools.patterns import pattern_size
from agentrl.tools.validator import MAX_STEPS, OutOfStepsError, Validator
from agentrl.types.seams import ToolSchema

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["", "a", "ab", "xyz"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abx"), below, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
PATTERNS = st.sampled_from(["^a", "b$", "x|y", "[ab]+", "^$"])
REFERENCES = st.sampled_from(["#/$defs/text", "#/$defs/tree", "#/$defs/pair"]).map(
    lambda name: {"$ref": name}
)
DEFINITIONS = {
    "text": {"type": "string", "maxLength": 2},
    "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, {"type": "integer"}]},
    "pair": {"prefixItems": [{"$ref": "#/$defs/text"}], "items": {"type": "null"}, "minItems": 1},
}


def keywords(below):
    lists = st.lists(below, min_size=1, max_size=3)
    tables = st.dictionaries(st.sampled_from("abx"), below, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
            "enum": st.lists(VALUES, max_size=3),
            "const": VALUES,
            "multipleOf": st.integers(1, 3),
            "minimum": st.integers(-2, 5),
            "minLength": st.integers(0, 2),
            "pattern": PATTERNS,
            "uniqueItems": st.booleans(),
            "items": below,
            "prefixItems": lists,
            "contains": below,
            "properties": tables,
            "patternProperties": st.dictionaries(PATTERNS, below, max_size=2),
            "additionalProperties": below,
            "propertyNames": below,
            "required": st.lists(st.sampled_from("abx"), unique=True, max_size=2),
            "dependentSchemas": tables,
            "not": below,
            "if": below,
            "then": below,
            "else": below,
            "allOf": lists,
            "anyOf": lists,
            "oneOf": lists,
        },
    )


SCHEMAS = st.recursive(
    st.booleans() | KINDS.map(lambda kind: {"type": kind}) | REFERENCES, keywords, max_leaves=4
)


@given(SCHEMAS.filter(lambda schema: isinstance(schema, dict)), VALUES)
def test_whether_a_value_fits_is_what_jsonschema_finds(schema, value):
    schema = {**schema, "$defs": DEFINITIONS}
    assert Validator(schema).is_valid(value) == Draft202012Validator(schema).is_valid(value)


UNION = {
    "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}],
}
LINK = {"type": "object", "properties": {"below": {"$ref": "#/$defs/union"}}, "required": ["below", "kind"]}
CHAIN = {
    "properties": {"x": {"$ref": "#/$defs/union"}},
    "$defs": {
        "union": UNION,
        "a": {**LINK, "properties": {**LINK["properties"], "kind": {"const": "a"}}},
        "b": {**LINK, "properties": {**LINK["properties"], "kind": {"const": "b"}}},
    },
}
ONE_OF = json.loads(json.dumps(CHAIN).replace("anyOf", "oneOf"))


def chain(depth: int, kind: str):
    value = None
    for _ in range(depth):
        value = {"below": value, "kind": kind}
    return value


@pytest.mark.parametrize("schema", [CHAIN, ONE_OF])
def test_the_steps_of_a_chain_of_unions_grow_with_its_length_not_with_its_paths(schema):
    def steps(depth: int) -> int:
        check = Validator(schema).check()
        assert check.fits({"x": chain(depth, "b")})
        return MAX_STEPS - check.steps_left

    assert steps(32) < 2.5 * steps(16)


def test_a_check_ends_with_its_steps():
    check = Validator({"items": {"type": "integer"}}).check(steps=50)
    with pytest.raises(OutOfStepsError):
        check.fits([1] * 1_000)


def foreign(parameters) -> Tool:
    async def taken(**arguments) -> str:
        return "taken"

    return Tool.described(ToolSchema("foreign", "Somebody else's.", {"type": "object", **parameters}), taken)


def doubling(levels: int, keyword: str):
    """References that have two to the power of `levels` paths."""
    table = {f"n{n}": {keyword: [{"$ref": f"#/$defs/n{n + 1}"}] * 2} for n in range(levels)}
    return {"properties": {"x": {"$ref": "#/$defs/n0"}}, "$defs": {**table, f"n{levels}": {"type": "string"}}}


def under(**schema):
    return {"properties": {"x": schema}}


ATTACKS = {
    "a chain that fits nothing": (CHAIN, chain(30, "c"), "anyOf"),
    "a chain deeper than the stack": (CHAIN, chain(62, "b"), "steps"),
    "references to references": (doubling(14, "allOf"), 1, "type"),
    "unions of unions": (doubling(14, "anyOf"), [], "anyOf"),
    "a pattern that backtracks": (under(pattern="^(a|a)*$"), "a" * 5_000 + "b", "pattern"),
    "a large pattern on a long text": (under(pattern="[ab]*a[ab]{300}[cd]"), "ab" * 90_000, "steps"),
    "objects compared with each other": (
        under(uniqueItems=True),
        [{"a": n} for n in range(3_000)] * 2,
        "uniqueItems",
    ),
    "a list compared with many values": (under(items={"enum": [*range(5_000)]}), [*range(5_001)], "enum"),
    "an integer beyond floats": (under(multipleOf=0.3), 10**400, "multipleOf"),
    "many errors": (under(items={"anyOf": [{"type": "string"}, {"type": "null"}]}), [1] * 30_000, "anyOf"),
}


@pytest.mark.parametrize("policy", ["strict", "coerce"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_in_one_sentence(attack, policy):
    schema, value, kind = ATTACKS[attack]
    with pytest.raises(ArgumentsRejected) as rejected:
        foreign(schema).reader.read({"x": value}, policy)
    assert rejected.value.kind in (kind, "steps")
    assert len(str(rejected.value)) < 2_500


def test_another_dialect_switches_no_bound_off():
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"$ref": "#"}}}
    check = Validator(schema).check(steps=20)
    with pytest.raises(OutOfStepsError):
        check.fits(json.loads('{"x":' * 40 + "1" + "}" * 40))


REFUSED = {
    "too large": (under(enum=[0] * 20_000), "have more than 10,000 values, or nest deeper than 32"),
    "too deep": (under(const=json.loads("[" * 40 + "]" * 40)), "nest deeper than 32"),
    "itself": (under(**{"$ref": "#/properties/x"}), "refer to themselves without going into"),
    "itself in a union": (
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}},
        "refer to themselves without going into",
    ),
    "a long row": (doubling(20, "anyOf"), "have more than 32 references and unions in a row"),
    "no schema": (under(**{"$ref": "#/properties"}), "refer to '#/properties', which they do not hold"),
    "alternatives": (under(anyOf=[{"const": n} for n in range(200)]), "have 200 alternatives"),
    "look-around": (under(pattern="(?=a)b"), "have the pattern .*, which cannot run in linear time"),
    "a back-reference": ({"patternProperties": {r"(a)\1": {}}}, "which cannot run in linear time"),
    "large patterns": (under(pattern="((a{50}){50}){50}"), "have patterns that are too large"),
    "a dynamic reference": (under(**{"$dynamicRef": "#a"}), r"use `\$dynamicRef`, which is not supported"),
    "another dialect inside": (under(**{"$schema": "x"}), r"hold `\$schema` inside"),
    "names that are none": (under(required=[{}] * 900), "`required` must hold names"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_without_bounds_is_refused_when_it_comes_in(name):
    schema, sentence = REFUSED[name]
    with pytest.raises(ToolDefinitionError, match=sentence):
        foreign(schema)


@dataclass
class Leaf:
    kind: Literal["leaf"]
    name: str


@dataclass
class Sum:
    kind: Literal["sum"]
    terms: list[Annotated[Sum | Product | Leaf, Field(discriminator="kind")]]


@dataclass
class Product:
    kind: Literal["product"]
    terms: list[Annotated[Sum | Product | Leaf, Field(discriminator="kind")]]


@dataclass
class Plus:
    left: Plus | Minus | None


@dataclass
class Minus:
    left: Plus | Minus | None


def test_a_function_with_a_union_that_holds_itself_needs_a_discriminator():
    def evaluate(term: Sum) -> str:
        """Evaluate a term."""
        return ""

    def ambiguous(term: Plus) -> str:
        """Evaluate a term."""
        return ""

    value = {"kind": "leaf", "name": "x"}
    for _ in range(10):
        value = {"kind": "sum", "terms": [{"kind": "product", "terms": [value]}]}
    term = Tool.of(evaluate).reader.read({"term": value}).values["term"]
    assert isinstance(term.terms[0], Product)
    with pytest.raises(ToolDefinitionError, match="`Plus` and `Minus` hold the union"):
        Tool.of(ambiguous)


@pytest.mark.parametrize("policy", ["strict", "coerce"])
def test_a_value_that_is_nested_too_deep_is_one_sentence_about_that(policy):
    reader = foreign(CHAIN).reader
    assert reader.read({"x": chain(UNION_LEVELS, "b")}, policy).values
    with pytest.raises(
        ArgumentsRejected, match=r"^foreign: the arguments are nested too deep: about 40 levels"
    ):
        reader.read({"x": chain(100, "b")}, policy)
    with pytest.raises(ArgumentsRejected, match=r"takes too many steps; write less"):
        foreign(under(pattern="[ab]*a[ab]{300}[cd]")).reader.read({"x": "ab" * 90_000}, policy)


async def test_of_a_check_in_its_thread_a_deadline_counts_the_cpu_time_alone(monkeypatch):
    async def run(work, *, thread):
        await asyncio.sleep(0.6)
        return work()

    monkeypatch.setattr(arguments, "run", run)
    reader = foreign(under(items={"type": "integer"})).reader
    async with stage("tool", 0.5):
        await reader.read_async({"x": [1] * 5_000})
    monkeypatch.setattr(arguments, "thread_time", iter([1.0, 1.4]).__next__)
    costly = stage("tool", 0.5)
    with pytest.raises(StageError, match="ArgumentsRejected"):
        await unfitting(reader, costly)
    assert 0.4 <= costly.seconds < 0.5


async def unfitting(reader, running):
    async with running:
        await reader.read_async({"x": ["1"] * 5_000})


async def test_a_long_check_leaves_the_event_loop(monkeypatch):
    threads: list[str | None] = []

    async def run(work, *, thread):
        threads.append(thread)
        return work()

    monkeypatch.setattr(arguments, "run", run)
    reader = foreign(under(items={"type": "integer"})).reader
    assert (await reader.read_async({"x": [1] * 10})).values == {"x": [1] * 10}
    assert threads == []
    assert (await reader.read_async({"x": [1] * 5_000})).values == {"x": [1] * 5_000}
    with pytest.raises(ArgumentsRejected):
        await reader.read_async({"x": ["1"] * 5_000})
    assert threads == ["arguments of foreign"] * 2


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 4),
        ("a{3}", 4),
        ("(ab){5}", 11),
        ("((a{9}){9}){9}", 730),
        ("[a-z]", 17),
        (r"\w{2}", 33),
        ("a*", 3),
    ],
)
def test_repetitions_multiply_the_size_of_a_pattern(pattern, size):
    assert pattern_size(pattern) == size
