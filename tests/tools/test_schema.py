from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field
from typing_extensions import TypedDict

from agentrl.errors import ToolDefinitionError
from agentrl.tools.arguments import explain
from agentrl.tools.schema import argument_descriptions, compile_validator, describe


class Box(TypedDict):
    width: int


def everything(
    query: str,
    top: Annotated[int, Field(ge=1, le=5, description="how many")] = 1,
    mode: Literal["fast", "exact"] = "fast",
    box: Box | None = None,
    weights: list[float] | None = None,
) -> str:
    """Search for
    something.

    This is not for the model.

    Args:
        query (str): what to look for,
            in words
        mode: how
    """
    return query


SCHEMA = describe(everything)


def test_name_and_first_paragraph_describe_the_tool():
    assert SCHEMA.name == "everything"
    assert SCHEMA.description == "Search for something."


def test_signature_becomes_json_schema():
    parameters = SCHEMA.parameters
    assert parameters["type"] == "object"
    assert parameters["required"] == ["query"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {
        "type": "string",
        "description": "what to look for, in words",
    }
    assert parameters["properties"]["top"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 5,
        "default": 1,
        "description": "how many",
    }
    assert parameters["properties"]["mode"]["enum"] == ["fast", "exact"]
    assert parameters["$defs"]["Box"]["properties"]["width"]["type"] == "integer"


def test_argument_section_ends_at_the_margin():
    text = "Do.\n\nArgs:\n    one: first\n    two: second:\n      goes on\n\nReturns:\n    three: no argument"
    assert argument_descriptions(text) == {"one": "first", "two": "second: goes on"}
    deeper = "Do.\n\nArgs:\n    one: first\n      two: still the first"
    assert argument_descriptions(deeper) == {"one": "first two: still the first"}
    assert argument_descriptions("No section. Args: none") == {}


def test_parameters_are_described_in_any_of_three_styles_or_by_their_annotation():
    numpy = (
        "Do.\n\nParameters\n----------\na : int\n    the first,\n    over two lines\nb, c : str\n    others"
    )
    assert argument_descriptions(numpy) == {"a": "the first, over two lines", "b": "others", "c": "others"}
    assert argument_descriptions("Do.\n\n:param a: the first\n:param int b: other") == {
        "a": "the first",
        "b": "other",
    }

    def find(
        word: Annotated[str, "to look for"], most: Annotated[int, "unused", Field(ge=1)] = 1, why: str = ""
    ) -> str:
        """Find a word.

        Args:
            most: at most so many
        """
        return word * most + why

    properties = describe(find).parameters["properties"]
    described = {name: value.get("description") for name, value in properties.items()}
    assert described == {"word": "to look for", "most": "at most so many", "why": None}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "everything: parameter `query` is missing; it must be a string."),
        ({"query": 3}, "everything: parameter `query` must be a string, but got 3."),
        ({"query": "x", "top": 2.0}, "everything: parameter `top` must be an integer, but got 2.0."),
        ({"query": "x", "top": True}, "everything: parameter `top` must be an integer, but got true."),
        ({"query": "x", "top": 9}, "everything: parameter `top` must satisfy maximum = 5, but got 9."),
        (
            {"query": "x", "mode": "slow"},
            'everything: parameter `mode` must be one of "fast", "exact", but got "slow".',
        ),
        (
            {"query": "x", "box": {"width": "w"}},
            'everything: parameter `box.width` must be an integer, but got "w".',
        ),
        (
            {"query": "x", "box": {}},
            "everything: parameter `width` is missing in parameter `box`; it must be an integer.",
        ),
        ({"query": "x", "box": 4}, "everything: parameter `box` must be an object or null, but got 4."),
        (
            {"query": "x", "weights": [1, 2.5, "3"]},
            'everything: parameter `weights[2]` must be a number, but got "3".',
        ),
        (
            {"query": "x", "weights": [float("nan")]},
            "everything: parameter `weights[0]` must be a number, but got NaN.",
        ),
        (
            {"query": "x", "mod": 1},
            "everything: there is no parameter `mod` (got 1); it takes `query`, `top`, `mode`, `box`, "
            "`weights`. Did you mean `mode`?",
        ),
    ],
)
def test_a_wrong_call_is_explained_in_one_sentence(arguments, sentence):
    validator = compile_validator(SCHEMA)
    assert not validator.is_valid(arguments)
    assert explain(SCHEMA, validator, arguments)[0] == sentence


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": ""},
        {"query": "x", "top": 5, "mode": "exact", "box": {"width": 1}, "weights": [1, 2.5]},
        {"query": "x", "box": None, "weights": None},
    ],
)
def test_a_right_call_is_valid(arguments):
    assert compile_validator(SCHEMA).is_valid(arguments)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)


@example({"query": None, "other": ["0000\x1f\ud7fc\U00010d3a\U00012544" * 4]})
@given(
    st.dictionaries(
        st.sampled_from(["query", "top", "mode", "box", "weights", "other"]), json_values, max_size=4
    )
)
def test_whatever_the_model_writes_gets_one_short_line(arguments):
    validator = compile_validator(SCHEMA)
    if validator.is_valid(arguments):
        return
    sentence, _ = explain(SCHEMA, validator, arguments)
    assert sentence.startswith("everything: ")
    assert "\n" not in sentence
    assert len(sentence) < 250


def no_hint(query) -> str:
    """Search."""
    return query


def no_docstring(query: str) -> str:
    return query


def keywords(**options: str) -> str:
    """Search."""
    return str(options)


def many(*queries: str) -> str:
    """Search."""
    return str(queries)


def positional(query: str, /) -> str:
    """Search."""
    return query


def not_json(day: date) -> str:
    """Search."""
    return str(day)


def nested_not_json(days: list[date]) -> str:
    """Search."""
    return str(days)


def number_keys(table: dict[int, str]) -> str:
    """Search."""
    return str(table)


def returns_bytes(query: str) -> bytes:
    """Search."""
    return query.encode()


def unresolved(query: str) -> str:
    """Search."""
    return query


unresolved.__annotations__["query"] = "Nowhere"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (no_hint, "tool `no_hint`, parameter `query` has no type hint; write `query: str`"),
        (no_docstring, "tool `no_docstring` has no docstring; write one sentence"),
        (keywords, "tool `keywords`, parameter `options` is variadic keyword"),
        (many, "tool `many`, parameter `queries` is variadic positional"),
        (positional, "tool `positional`, parameter `query` is positional-only"),
        (not_json, "tool `not_json`, parameter `day` has the type <class 'datetime.date'>; use str, int"),
        (nested_not_json, "tool `nested_not_json`, parameter `days` has the type"),
        (number_keys, "tool `number_keys`, parameter `table` has the type"),
        (returns_bytes, "tool `returns_bytes` is annotated to return <class 'bytes'>, which is no text"),
        (unresolved, "tool `unresolved`: a type hint cannot be resolved (name 'Nowhere' is not defined)"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_with_the_next_move(function, sentence):
    with pytest.raises(ToolDefinitionError) as refused:
        describe(function)
    assert str(refused.value).startswith(sentence)
