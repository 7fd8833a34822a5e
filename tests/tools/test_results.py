"""What tools return is text, or becomes JSON."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import BaseModel

from agentrl.errors import ToolRejected
from agentrl.tools import Tool, tool
from agentrl.types import Message


class Place(BaseModel):
    """A model of pydantic."""

    city: str


@dataclass(frozen=True)
class Found:
    """A dataclass that holds a model."""

    place: Place
    number: int = 2


RESULTS = {
    "text": "text",
    "dict": {"item": "é", "numbers": [1, 2.5, None, True]},
    "list": ["a", ["b"]],
    "tuple": (1, 2),
    "integer": 3,
    "number": 0.5,
    "None": None,
    "boolean": False,
    "array": np.arange(3),
    "scalar": {"mean": np.float32(0.5), "count": np.int64(3)},
    "set": {"b", "a", "c"},
    "model": [Place(city="Oslo")],
    "dataclass": Found(Place(city="Oslo")),
    "date": datetime.date(2024, 5, 1),
    "surrogate": {"text": "\ud800"},
}
TEXTS = {
    "text": "text",
    "dict": '{"item": "é", "numbers": [1, 2.5, null, true]}',
    "list": '["a", ["b"]]',
    "tuple": "[1, 2]",
    "integer": "3",
    "number": "0.5",
    "None": "null",
    "boolean": "false",
    "array": "[0, 1, 2]",
    "scalar": '{"mean": 0.5, "count": 3}',
    "set": '["a", "b", "c"]',
    "model": '[{"city": "Oslo"}]',
    "dataclass": '{"place": {"city": "Oslo"}, "number": 2}',
    "date": '"2024-05-01"',
    "surrogate": '{"text": "\ud800"}',
}


def returning(result) -> Tool:
    """A tool with this result."""

    @tool(inline=True)
    def give():
        """Give a result."""
        return result

    return Tool.of(give)


@pytest.mark.parametrize("kind", RESULTS)
async def test_a_result_that_is_no_text_is_written_as_json(kind):
    text = await returning(RESULTS[kind]).invoke({})
    assert text == TEXTS[kind]
    assert kind == "text" or json.dumps(json.loads(text), ensure_ascii=False) == text


@pytest.mark.parametrize("is_async", [True, False])
async def test_plain_and_async_tools_may_be_annotated_to_return_data(is_async):
    async def count(word: str) -> dict[str, int]:
        """Count letters."""
        return {word: len(word)}

    def count_plainly(word: str) -> list[int]:
        """Count letters."""
        return [len(word)]

    built = Tool.of(count if is_async else count_plainly)
    assert await built.invoke({"word": "abc"}) == ('{"abc": 3}' if is_async else "[3]")


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    "result", [b"bytes", {"a": b"bytes"}, object(), CIRCLE, {(1, 2): 3}, Message("user", "x"), lambda: 3]
)
async def test_a_result_without_a_form_in_json_names_the_tool(result):
    with pytest.raises(
        TypeError, match=r"^tool `give` returned .*, which JSON cannot hold .*; return text or"
    ):
        await returning(result).invoke({})


async def test_a_number_of_too_many_digits_is_a_sentence_for_the_model():
    for result in (10**5000, {"number": 10**5000}):
        with pytest.raises(ToolRejected, match="give returned a number of too many digits") as refused:
            await returning(result).invoke({})
        assert refused.value.kind == "digits"
