"""The inline dialect without tokens: written text is read back, and reading never raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Message, Tags, call, say
from agentrl.envs import inline_text
from agentrl.tools import Tool
from agentrl.types import ToolCall
from tests.worlds import add, echo

TOOLS = tuple(Tool.of(function).schema for function in (echo, add))
TAGS = Tags(result="information")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<")).map(str.strip)
ACTIONS = st.one_of(
    WORDS.map(say),
    WORDS.map(lambda text: call("echo", text=text)),
    st.builds(lambda a, b: call("add", a=a, b=b), st.integers(), st.integers()),
)


@given(action=ACTIONS)
def test_what_is_written_is_read_back(action):
    read = inline_text.read(inline_text.write(action, TOOLS, TAGS), TOOLS, TAGS)
    calls = tuple(ToolCall(tool_call.name, tool_call.arguments) for tool_call in read.tool_calls)
    assert Message("assistant", read.content, read.reasoning, calls) == action


@given(
    text=st.text()
    | st.lists(st.sampled_from(["<echo>", "</echo>", "<add>", "</add>", "{", "1"])).map("".join)
)
def test_reading_never_raises(text):
    assert inline_text.read(text, TOOLS, TAGS).role == "assistant"


def test_text_before_the_first_tag_is_reasoning_and_text_after_it_is_dropped():
    read = inline_text.read('so <add>{"a": 1}</add><answer>2</answer>', TOOLS, TAGS)
    assert (read.reasoning, read.content) == ("so", "")
    assert [(tool_call.name, tool_call.arguments) for tool_call in read.tool_calls] == [("add", {"a": 1})]


def test_text_without_a_tag_is_a_malformed_call_that_names_the_forms():
    (only,) = inline_text.read("Zürich", TOOLS, TAGS).tool_calls
    assert (only.arguments, only.raw) == (None, "Zürich")
    assert only.error == "Nothing to do was found in that; write " + " or ".join(
        ["<echo> ...</echo>", "<add> ...</add>", "<answer> ...</answer>."]
    )


def test_a_malformed_call_cannot_be_written():
    broken = Message("assistant", tool_calls=(ToolCall("add", None, raw="<add", error="no"),))
    with pytest.raises(ValueError, match="malformed call '<add'"):
        inline_text.write(broken, TOOLS, TAGS)
