"""A value that fits the schema reaches the function unchanged; the error for another names its parameter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator
from typing_extensions import TypedDict

from agentrl.errors import ToolDefinitionError
from agentrl.tools import ArgumentsRejected, Tool
from agentrl.types import JSON


class Unit(StrEnum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    WORD = "word"
    NUMBER = 3
    NOTHING = None


@dataclass
class Place:
    city: str
    level: Level = Level.LOW
    near: list[Place] = field(default_factory=list)


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")

    stops: list[Place]
    unit: Unit | None = None
    days: Annotated[int, Field(ge=1, le=30)] = 1

    @field_validator("stops")
    @classmethod
    def _starts_somewhere(cls, stops: list[Place]) -> list[Place]:
        if stops and stops[0].city == "nowhere":
            raise ValueError("a trip cannot\nstart nowhere")
        return stops


class Loose(TypedDict):
    width: int


def plan(
    *,
    trip: Trip,
    unit: Unit = Unit.CELSIUS,
    mixed: Mixed | None = None,
    places: dict[str, Place] | None = None,
    trips: list[Trip] | None = None,
    numbers: list[int] | None = None,
    share: float = 0.5,
    loud: bool = False,
    note: str = "",
    loose: Loose | None = None,
    mode: Literal["fast", "exact"] = "fast",
    either: int | str = 0,
) -> str:
    """Plan a trip."""
    return ""


TOOL = Tool.of(plan)
TRIP = {"stops": [{"city": "Torek"}]}
cities = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda city: city != "nowhere")
places = st.recursive(
    st.builds(Place, cities, st.sampled_from(Level)),
    lambda below: st.builds(Place, cities, st.sampled_from(Level), st.lists(below, max_size=2)),
    max_leaves=4,
)
trips = st.builds(Trip, stops=st.lists(places, max_size=2), unit=st.none() | st.sampled_from(Unit))
calls = st.fixed_dictionaries(
    {"trip": trips},
    optional={
        "unit": st.sampled_from(Unit),
        "mixed": st.sampled_from(Mixed),
        "places": st.none() | st.dictionaries(cities, places, max_size=2),
        "trips": st.lists(trips, max_size=2),
        "numbers": st.none() | st.lists(st.integers(), max_size=3),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "loud": st.booleans(),
        "note": st.text(),
        "loose": st.fixed_dictionaries({"width": st.integers()}),
        "mode": st.sampled_from(["fast", "exact"]),
        "either": st.integers() | st.text(),
    },
)


def plain(values) -> dict[str, JSON]:
    """The JSON that a model writes for these values."""
    return {key: TypeAdapter(type(value)).dump_python(value, mode="json") for key, value in values.items()}


def same(actual, expected) -> bool:
    return type(actual) is type(expected) and actual == expected


@given(calls, st.sampled_from(["strict", "coerce"]))
def test_what_fits_the_schema_reaches_the_function_equal(values, policy):
    reading = TOOL.reader.read(plain(values), policy)
    expected = {key: None if value is Mixed.NOTHING else value for key, value in values.items()}
    assert reading.values == expected
    assert all(same(reading.values[key], expected[key]) for key in expected)
    assert not reading.coerced


WRONG = {
    "trip": [None, 3, {}, {"stops": [{}]}, {"stops": [], "days": 0}, {"stops": [], "extra": 1}],
    "unit": ["warm", 1, None],
    "mixed": ["words", 4, True],
    "places": [[], {"a": {"city": 1}}, {"a": {"city": "x", "level": 3}}],
    "trips": [{}, [{"stops": "x"}], [[]]],
    "numbers": [["x"], [1.5], {}],
    "share": ["half", None, [0.5], float("nan")],
    "loud": ["maybe", 2, None],
    "note": [None, [], {}],
    "loose": [{}, {"width": "wide"}, 4],
    "mode": ["slow", None],
    "either": [None, 1.5, []],
}


@given(calls, st.data())
def test_arguments_that_do_not_fit_give_one_sentence_that_names_the_parameter(values, data):
    key = data.draw(st.sampled_from(sorted(WRONG)))
    broken = plain(values) | {key: data.draw(st.sampled_from(WRONG[key]))}
    with pytest.raises(ArgumentsRejected) as rejected:
        TOOL.reader.read(broken)
    sentence = str(rejected.value)
    assert sentence.startswith("plan: ")
    assert f"parameter `{key}" in sentence
    assert "\n" not in sentence
    assert rejected.value.kind


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        (
            {"trip": TRIP, "unit": "warm"},
            "enum",
            'plan: parameter `unit` must be one of "celsius", "kelvin", but got "warm".',
        ),
        (
            {"trip": TRIP, "places": {"x": {}}},
            "required",
            "plan: parameter `city` is missing in parameter `places.x`; it must be a string.",
        ),
        (
            {"trip": TRIP, "loose": {"width": 1, "widht": 2}},
            "additionalProperties",
            "plan: there is no parameter `widht` in parameter `loose` (got 2); it takes `width`. "
            "Did you mean `width`?",
        ),
        (
            {"trip": {"stops": [{"city": "x", "level": 5}]}},
            "enum",
            "plan: parameter `trip.stops[0].level` must be one of 1, 2, but got 5.",
        ),
        (
            {"trip": {"stops": [{"city": "nowhere"}]}},
            "value",
            "plan: parameter `trip.stops` does not fit: Value error, a trip cannot start nowhere; "
            'it got [{"city": "nowhere"}].',
        ),
    ],
)
def test_the_sentence_names_the_nested_parameter(arguments, kind, sentence):
    with pytest.raises(ArgumentsRejected) as rejected:
        TOOL.reader.read(arguments)
    assert (str(rejected.value), rejected.value.kind) == (sentence, kind)


def test_the_model_sees_values_and_defaults():
    properties = TOOL.schema.parameters["properties"]
    assert properties["unit"]["default"] == "celsius"
    assert TOOL.schema.parameters["$defs"]["Unit"]["enum"] == ["celsius", "kelvin"]
    assert TOOL.schema.parameters["required"] == ["trip"]
    json.dumps(TOOL.schema.parameters)


@pytest.mark.parametrize(
    ("key", "written", "received"),
    [
        ("numbers", "5", [5]),
        ("numbers", 5, [5]),
        ("numbers", ["5", 6.0], [5, 6]),
        ("numbers", '[1, "2"]', [1, 2]),
        ("share", "0.25", 0.25),
        ("loud", "true", True),
        ("loud", "No", False),
        ("loud", 1, True),
        ("note", 5, "5"),
        ("note", 0.5, "0.5"),
        ("loose", '{"width": "3"}', {"width": 3}),
        ("trips", {"stops": {"city": 7}}, [Trip(stops=[Place("7")])]),
        ("trip", json.dumps(TRIP), Trip(stops=[Place("Torek")])),
        ("places", {"x": {"city": "y", "level": "2"}}, None),
    ],
)
def test_coerce_mends_what_is_right_in_meaning(key, written, received):
    arguments = {"trip": TRIP} | {key: written}
    with pytest.raises(ArgumentsRejected):
        TOOL.reader.read(arguments)
    if received is None:
        received = {"x": Place("y", Level.HIGH)}
    reading = TOOL.reader.read(arguments, "coerce")
    assert reading.coerced
    assert same(reading.values[key], received)
    assert arguments[key] == written


@pytest.mark.parametrize(
    "arguments",
    [
        {"trip": TRIP, "share": "nan"},
        {"trip": TRIP, "share": "inf"},
        {"trip": TRIP, "numbers": "5.5"},
        {"trip": TRIP, "note": None},
        {"trip": TRIP, "note": True},
        {"trip": TRIP, "unit": ["celsius"]},
        {"trip": TRIP, "surprise": 1},
        {"unit": "celsius"},
        {"trip": "[" * 100_000},
    ],
)
def test_coerce_changes_nothing_else_and_its_error_shows_the_original_arguments(arguments):
    with pytest.raises(ArgumentsRejected) as strict:
        TOOL.reader.read(arguments)
    with pytest.raises(ArgumentsRejected) as coerce:
        TOOL.reader.read(arguments, "coerce")
    assert str(coerce.value) == str(strict.value)


def refusal(arguments, policy):
    try:
        TOOL.reader.read(arguments, policy)
    except ArgumentsRejected as rejected:
        return str(rejected)
    return ""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*WRONG, "other"]), json_values, max_size=4))
def test_whatever_is_written_is_read_or_refused_in_a_sentence(arguments):
    for policy in ("strict", "coerce"):
        sentence = refusal(arguments, policy)
        assert "\n" not in sentence
        assert len(sentence) < 500


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


def take(open_: Open) -> str:
    """Take anything."""
    return ""


def test_a_model_that_allows_more_gets_more():
    assert Tool.of(take).reader.read({"open_": {"x": 1}}).values["open_"].x == 1


class Node(TypedDict):
    below: list[Node]


def walk(node: Node) -> str:
    """Walk a tree."""
    return str(node)


def dated(day: Dated) -> str:
    """Take a day."""
    return str(day)


@dataclass
class Dated:
    day: list[complex]


def test_types_that_hold_themselves_are_described_and_types_that_json_lacks_refused_inside_others():
    node = {"below": [{"below": []}]}
    assert Tool.of(walk).reader.read({"node": node}).values == {"node": node}
    with pytest.raises(ToolDefinitionError, match="parameter `day` has the type"):
        Tool.of(dated)
