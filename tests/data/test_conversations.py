"""Conversations of files: what is read of a row, and the sentence about a row that is none."""

from __future__ import annotations

import json

import pytest

from agentrl.data.conversations import Dialogues
from agentrl.errors import DataError
from agentrl.types.seams import ToolSchema
from tests.data.files import write_arrow, write_lines, write_parquet

USER, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"x": 1}}}


def read(tmp_path, *rows, path=None, messages_key="messages", tools_key=None):
    file = write_lines(tmp_path / "c.jsonl", rows)
    return list(Dialogues(path or str(file), messages_key=messages_key, tools_key=tools_key))


def test_a_turn_is_what_came_since_the_last_one_and_the_answer(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    (dialogue,) = read(tmp_path, {"messages": [system, USER, CALL, RESULT, ANSWER, USER], "tools": [TOOL]})
    first, second = dialogue.turns
    assert [message.role for message in first.observation] == ["system", "user"]
    assert first.action.tool_calls[0].arguments == {"a": 1, "b": 2}
    assert [message.text for message in second.observation] == ["3"]
    assert second.action.text == "Three."
    assert dialogue.tools == (ToolSchema("add", "Add.", {"x": 1}),)
    assert dialogue.where.endswith("c.jsonl, line 1")


@pytest.mark.parametrize("key", ["weight", "step_loss_mask"])
@pytest.mark.parametrize(("value", "expected"), [(0, False), (False, False), (1, True), (None, True)])
def test_a_key_of_a_message_switches_its_loss_off(tmp_path, key, value, expected):
    (dialogue,) = read(tmp_path, {"messages": [USER, {**ANSWER, key: value}, USER, ANSWER]})
    assert [turn.is_trained for turn in dialogue.turns] == [expected, True]


@pytest.mark.parametrize("name", ["c.parquet", "c.arrow", "c.json", "c.jsonl"])
def test_every_format_and_slice_is_read(tmp_path, name):
    rows = [{"messages": [USER, {**ANSWER, "content": str(n)}]} for n in range(9)]
    write = {"c.parquet": write_parquet, "c.arrow": write_arrow}.get(name, write_lines)
    file = write(tmp_path / name, rows)
    if name == "c.json":
        file.write_text(json.dumps(rows))
    sliced = Dialogues(f"{file}@[2:-3]", messages_key="messages", tools_key=None)
    assert len(sliced) == 4
    assert [dialogue.turns[0].action.text for dialogue in sliced] == ["2", "3", "4", "5"]
    assert all(dialogue.tools is None for dialogue in sliced)


def test_messages_may_be_json_in_a_string_and_in_another_column(tmp_path):
    row = {"chat": {"turns": json.dumps([USER, ANSWER])}, "functions": json.dumps([TOOL])}
    (dialogue,) = read(tmp_path, row, messages_key="chat.turns", tools_key="functions")
    assert dialogue.turns[0].action.text == "Three."
    assert dialogue.tools is not None


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"chat": []}, "line 2: there is no `messages`. It has `chat`: name one with messages_key."),
        ({"messages": "hello"}, "line 2: `messages` is no list of messages."),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": [USER]}, "has no message of the assistant, so there is nothing to imitate."),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "that is trained: each has weight 0."),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "a message 2 with a weight of 0.5; it is 0 or 1."),
        ({"messages": [ANSWER]}, "out of order: message 1, of the assistant, begins the conversation."),
        ({"messages": [USER, ANSWER, ANSWER]}, "message 3, of the assistant, follows another"),
        ({"messages": [USER, RESULT, ANSWER]}, "message 2 is of a tool that was not called."),
        ({"messages": [USER, CALL, RESULT, ANSWER, RESULT]}, "message 5 is of a tool that was not called."),
        (
            {"messages": [USER, {"role": "system", "content": ""}, ANSWER]},
            "message 2, of the system, is not the first.",
        ),
        ({"messages": [{"role": "human", "content": ""}]}, "of the role 'human'; roles are system"),
        (
            {"messages": [USER, {**CALL, "tool_calls": [{"name": "add", "arguments": "{a: 1}"}]}]},
            "a message 2 with a tool call whose arguments are not JSON: '{a: 1}'.",
        ),
        ({"messages": [USER, ANSWER], "tools": [{}]}, "`tools` has a tool 1 without a name"),
    ],
)
def test_a_row_that_is_no_conversation_is_one_sentence(tmp_path, row, sentence):
    with pytest.raises(DataError) as caught:
        read(tmp_path, {"messages": [USER, ANSWER]}, row)
    assert "c.jsonl, line 2: " in str(caught.value)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_conversations_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds no conversations; check the file and the slice\."):
        read(tmp_path, {"messages": [USER, ANSWER]}, path=f"{tmp_path / 'c.jsonl'}@[1:]")
    with pytest.raises(DataError, match="there is no file or folder nowhere"):
        read(tmp_path, path="nowhere.jsonl")


def test_a_column_of_tools_that_was_named_has_to_be_there(tmp_path):
    with pytest.raises(DataError, match="there is no `functions`"):
        read(tmp_path, {"messages": [USER, ANSWER]}, tools_key="functions")
    file = write_parquet(tmp_path / "c.parquet", [{"messages": [USER, ANSWER]}])
    with pytest.raises(DataError, match="there is no `functions`"):
        read(tmp_path, path=str(file), tools_key="functions")
