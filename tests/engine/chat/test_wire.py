"""Every reply of an endpoint is a turn that can be sent back, or a ValueError."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.chat.agent import Transcript
from agentrl.engine.chat.wire import error_code, error_text, is_context_overflow, read_reply
from agentrl.types import Message, Usage
from tests.engine.chat.chat_server import USAGE, assistant, reply

WORDS = st.text(st.characters(codec=None), max_size=8) | st.sampled_from(['{"a": 1}', "{", "stop", "length"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(WORDS, values, max_size=3),
    max_leaves=6,
)


def table(**fields):
    return st.fixed_dictionaries({}, optional={name: values | ANYTHING for name, values in fields.items()})


CALL = table(id=st.sampled_from(["a", "b"]), function=table(name=WORDS, arguments=WORDS))
MESSAGE = table(
    content=WORDS | st.lists(table(text=WORDS), max_size=2),
    refusal=WORDS,
    reasoning_content=WORDS,
    tool_calls=st.lists(CALL, max_size=3),
)
USED = table(
    prompt_tokens=st.integers(),
    completion_tokens=st.integers(),
    prompt_tokens_details=table(cached_tokens=st.integers()),
)
REPLY = st.fixed_dictionaries(
    {"choices": st.tuples(st.fixed_dictionaries({"message": MESSAGE}, optional={"finish_reason": WORDS}))},
    optional={"usage": USED},
)


@given(REPLY)
def test_any_message_is_a_turn_that_can_be_sent_back(payload):
    body = json.dumps(payload).encode()
    with suppress(ValueError):  # the endpoint may have ended the turn itself
        read = read_reply(body)
        transcript = Transcript()
        transcript.add_turn(read.body, [call.id for call in read.message.tool_calls])
        transcript.add_observation((Message("user", "?"),))
        sent = json.loads(json.dumps(transcript.messages, ensure_ascii=False).encode())
        calls = sent[0].get("tool_calls", [])
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        assert [call["id"] for call in calls] == [result["tool_call_id"] for result in sent[1:-1]]
        assert len({call.id for call in read.message.tool_calls}) == len(calls)
        assert read.usage is None or min(astuple(read.usage)[:4]) >= 0
        assert read.usage is None or read.usage.cached_tokens <= read.usage.prompt_tokens
        return
    assert payload["choices"][0]["finish_reason"] in ("abort", "error")


@given(ANYTHING | REPLY | MESSAGE)
def test_any_other_payload_is_a_value_error(payload):
    with suppress(ValueError):
        read_reply(json.dumps(payload).encode())


@given(st.binary(max_size=64) | ANYTHING.map(lambda value: json.dumps({"error": value}).encode()))
def test_an_error_is_always_a_short_printable_line(body):
    line = error_text(body)
    assert line.isprintable()
    assert len(line) <= 203
    assert isinstance(error_code(body), str)
    assert is_context_overflow(500, body) is False


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, (20, 5, 8, 2)),
        ({"prompt_tokens_details": {"cached_tokens": 21}}, (20, 5, 20, 2)),
        ({"prompt_tokens_details": None, "completion_tokens_details": None}, (20, 5, 0, 0)),
        ({"prompt_tokens": -1, "completion_tokens": "5"}, (0, 0, 0, 2)),
    ],
)
def test_tokens_are_counts(reported, expected):
    assert read_reply(json.dumps(reply(assistant("x"), usage=USAGE | reported)).encode()).usage == Usage(
        *expected
    )


@pytest.mark.parametrize(
    ("content", "thought", "answer"),
    [
        ("<think>\n6 times 7</think>\n\n42", "6 times 7", "42"),
        # The prompt opened the thought, as for DeepSeek-R1 and Qwen3-Thinking.
        ("6 times 7\n</think>\n\n42", "6 times 7", "42"),
        ("\n<think>\n\n</think>\n\n42", None, "42"),
        ("<think>\n6 times", "6 times", ""),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        (
            "Tags such as <think> and </think> mark a thought.",
            None,
            "Tags such as <think> and </think> mark a thought.",
        ),
        ("42", None, "42"),
        ("", None, ""),
    ],
)
def test_a_thought_in_the_content_is_reasoning(content, thought, answer):
    read = read_reply(json.dumps(reply(assistant(content))).encode())
    assert (read.message.reasoning, read.message.text) == (thought, answer)
    assert read.body["content"] == content


def test_content_beside_a_field_of_reasoning_is_the_answer_as_it_is():
    read = read_reply(json.dumps(reply(assistant("a</think>b", reasoning_content="Hm."))).encode())
    assert (read.message.reasoning, read.message.text) == ("Hm.", "a</think>b")


def steps_and_ids(ids: list[str]) -> tuple[int, list[str]]:
    """How many lines run while a reply with calls of these ids is read, and the ids that they get."""
    calls = [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in ids]
    body = json.dumps(reply({"role": "assistant", "content": "", "tool_calls": calls})).encode()
    steps = 0

    def count(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        read = read_reply(body)
    finally:
        sys.settrace(before)
    return steps, [call.id for call in read.message.tool_calls]


def in_the_way(number: int) -> list[str]:
    """Ids that are where calls with equal ids would go."""
    half = number // 2
    taken = [f"a_{call}" + f"_{call}" * (call % 3) for call in range(half, number)]
    return [*taken, *["a"] * (number - half)]


@pytest.mark.parametrize(
    "ids", [lambda n: ["a"] * n, lambda n: [""] * n, lambda n: ["call_1", ""] * (n // 2), in_the_way]
)
def test_calls_with_equal_ids_take_work_and_space_in_proportion_to_their_number(ids):
    few, few_ids = steps_and_ids(ids(200))
    many, many_ids = steps_and_ids(ids(800))
    assert len(set(many_ids)) == 800
    assert many < 4.4 * few
    assert sum(map(len, many_ids)) < 6 * sum(map(len, few_ids))


def test_of_the_calls_of_a_reply_a_thousand_are_read():
    _, ids = steps_and_ids([f"c{n}" for n in range(3_000)])
    assert ids == [f"c{n}" for n in range(1_000)]
