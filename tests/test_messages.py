"""Messages, prompts and tasks in the forms in which authors write them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from agentrl.types import (
    History,
    Message,
    Restart,
    Step,
    Task,
    Text,
    observation_of,
    quoted,
)


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        ("robot", r"the role of a message is one of system, user, assistant, tool; got 'robot' \(str\)\.$"),
        ("assistent", "Did you mean `assistant`\\?"),
        (["user"], r"got \['user'\] \(list\)"),
    ],
)
def test_a_role_that_does_not_exist_is_refused(role, sentence):
    with pytest.raises(ValueError, match=sentence):
        Message(role, "x")


@pytest.mark.parametrize("content", [5, None, {"type": "text"}, ["text"], [Text("a"), 5]])
def test_content_that_is_neither_text_nor_parts_is_refused(content):
    with pytest.raises(ValueError, match=r"the content of a message is .* write text, such as str\(value\)"):
        Message("user", content)


def test_content_may_be_a_list_of_parts():
    assert Message("user", [Text("a"), Text("b")]).content == (Text("a"), Text("b"))


@pytest.mark.parametrize("id", [7, np.int64(7), "7"])
def test_the_id_of_a_task_becomes_text(id):
    assert Task(id, "?").id == Task.ask(id, "?").id == "7"


@pytest.mark.parametrize("id", [None, 7.0, True, b"7"])
def test_an_id_that_is_neither_text_nor_an_integer_is_refused(id):
    with pytest.raises(ValueError, match="the id of a task is text or an integer, got"):
        Task(id, "?")


@pytest.mark.parametrize("answer", [5, 0.5, True, ["5"], b"5"])
def test_an_answer_that_is_no_text_is_refused_with_what_to_write(answer):
    with pytest.raises(
        ValueError, match=r"the answer of task `a` is .* so write answer=.*, or keep the value in"
    ):
        Task.ask("a", "?", answer)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("What?", [("user", "What?")]),
        (Message("system", "Be brief."), [("system", "Be brief.")]),
        ({"role": "system", "content": "Be brief."}, [("system", "Be brief.")]),
        (
            ["One.", Message("assistant", "Two."), {"role": "user", "content": "Three."}],
            [("user", "One."), ("assistant", "Two."), ("user", "Three.")],
        ),
        ((), []),
    ],
)
def test_a_prompt_may_be_text_and_messages(prompt, messages):
    task = Task("a", prompt)
    assert isinstance(task.prompt, tuple)
    assert [(message.role, message.content) for message in task.prompt] == messages
    assert Step.going(*([prompt] if isinstance(prompt, str) else task.prompt)).observation == task.prompt


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (5, "the prompt of task `a` is wrong: it is 5 (int); write text, or Messages"),
        (None, "it is None (NoneType); write text, or Messages"),
        ([5], "it holds 5 (int); write text, or Messages"),
        ({"role": "user"}, "it holds {'role': 'user'} (dict)"),
        ({"role": "robot", "content": "x"}, "the role of a message is one of"),
    ],
)
def test_a_prompt_that_holds_something_else_is_refused(prompt, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Task("a", prompt)


def test_a_history_is_no_other_observation():
    history = History((Message("user", "x"),), Restart.COMPACTED)
    assert observation_of(history) is history


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 10**6] * 100, dict.fromkeys(range(99), "x" * 999)])
def test_values_in_error_messages_are_short(value):
    assert len(quoted(value)) < 100


def test_a_number_that_python_does_not_write_can_be_in_an_error_message():
    assert quoted(10**5000) == "a number of many digits (int)"
