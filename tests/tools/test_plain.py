"""What is found to fit without `jsonschema` fits by `jsonschema`."""

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.tools import Tool
from agentrl.tools.arguments import PlainParameters

KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
NAMES = st.sampled_from(["a", "b", "c"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
PROPERTY = st.fixed_dictionaries(
    {"type": KINDS}, optional={"description": st.just("d"), "default": VALUES, "minimum": st.just(3)}
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(NAMES, PROPERTY)},
    optional={
        "required": st.lists(NAMES, unique=True),
        "additionalProperties": st.booleans(),
        "minProperties": st.just(2),
    },
)


@given(SCHEMAS, st.dictionaries(NAMES, VALUES))
def test_what_surely_fits_fits(schema, values):
    plain = PlainParameters.of(schema)
    if plain is not None and plain.surely_fit(values):
        assert Draft202012Validator(schema).is_valid(values)


def test_a_call_of_a_plain_tool_is_found_to_fit_and_what_may_not_is_left_to_the_schema():
    def look(where: str, times: int = 1, far: bool = False, share: float = 0.5) -> str:
        """Look."""
        return where

    plain = PlainParameters.of(Tool.of(look).schema.parameters)
    assert plain is not None
    assert plain.surely_fit({"where": "x"})
    assert plain.surely_fit({"where": "x", "times": 2, "far": True, "share": 1})
    wrong = ({}, {"where": 1}, {"where": "x", "times": True}, {"where": "x", "other": 1}, {"times": 1})
    assert not any(plain.surely_fit(values) for values in wrong)


def test_parameters_of_which_more_is_said_are_left_to_the_schema():
    def pick(names: list[str]) -> str:
        """Pick."""
        return names[0]

    assert PlainParameters.of(Tool.of(pick).schema.parameters) is None
    assert PlainParameters.of({"type": "object", "properties": {"a": {"enum": ["x"]}}}) is None
    assert PlainParameters.of({"type": "object", "patternProperties": {}}) is None
    assert PlainParameters.of({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}) is None
