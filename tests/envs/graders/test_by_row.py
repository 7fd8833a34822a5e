"""The grader of data sets of several kinds: each row names its own."""

from __future__ import annotations

import pytest

from agentrl import Task, UserError
from agentrl.envs.graders import expert_answers, make_grader
from agentrl.errors import ConfigError, GradingError

pytestmark = pytest.mark.usefixtures("released")


def row(name, label="72", **metadata):
    return Task.ask("t", "?", label, **({} if name is None else {"rm_type": name}), **metadata)


@pytest.mark.parametrize(
    ("task", "answer", "reward"),
    [
        (row("exact_match", "Paris"), "paris", 1.0),
        (row("number"), "So it is 72.", 1.0),
        (row("math", "1/2"), r"\boxed{0.5}", 1.0),
        # What is in the box is read in the form of each grader.
        (row("boxed_math", "1/2"), r"so \boxed{0.5}", 1.0),
        (row("boxed_dapo"), r"so \boxed{72}", 1.0),
        (row("boxed_dapo"), r"so \boxed{71}", -1.0),
        (row("boxed_gpqa", "B"), r"A? No: \boxed{B}", 1.0),
        (row("boxed_number"), r"12, no: \boxed{72} and 3", 1.0),
        (row("boxed_f1", None, answers=["Rio de Janeiro", "Rio"]), r"\boxed{Rio}", 1.0),
        (row("boxed_number"), "72", 0.0),
        (row("boxed_exact_match"), r"72 \boxed{71}", 0.0),
    ],
)
async def test_a_row_is_graded_by_the_name_in_its_metadata(task, answer, reward):
    assert float(await make_grader("by_row")(task, answer)) == reward


async def test_key_default_and_settings_are_chosen():
    grade = make_grader(
        "by_row", key="kind", default="number", settings={"deepscaler": {"after_think": False}}
    )
    assert await grade(Task.ask("t", "?", "3"), "3") == 1.0
    assert float(await grade(Task.ask("t", "?", "0.5", kind="deepscaler"), r"\boxed{1/2}")) == 1.0
    assert float(await make_grader("by_row")(row("deepscaler", "0.5"), r"\boxed{1/2}")) == 0.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (None, "t: the metadata has no `rm_type`, the name of a grader"),
        (3, "has no `rm_type`"),
        ("f2", "`rm_type` = 'f2' names no grader. Did you mean `f1`?"),
        ("boxed_", "names no grader"),
        ("os:system", "names no grader"),
        ("by_row", "names no grader"),
    ],
)
async def test_a_row_without_a_grader_fails_and_is_no_zero(name, sentence):
    with pytest.raises(GradingError) as caught:
        await make_grader("by_row")(row(name), "72")
    assert sentence in caught.value.detail


def test_an_expert_of_a_row_without_a_grader_has_no_answer():
    write = expert_answers(make_grader("by_row"))
    assert write(row(None)) is None
    assert write(row("code")) is None
    assert write(row("boxed_number", r"\boxed{72}")) == r"\boxed{72}"


def test_settings_of_no_grader_are_one_sentence():
    with pytest.raises(ConfigError, match="no reward `f2`"):
        make_grader("by_row", default="f2")
    with pytest.raises(UserError, match="takes no settings"):
        make_grader("by_row", settings={"f1": {"x": 1}})
