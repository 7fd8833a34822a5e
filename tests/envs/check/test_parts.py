"""The parts of the check whose rules can be stated: intervals, arguments, leaks, traces, counted awaits."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from enum import StrEnum
from typing import Annotated, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from typing_extensions import TypedDict

from agentrl import Image, Message, Task, Text
from agentrl.envs.check import arguments
from agentrl.envs.check.intervals import Z, interval
from agentrl.envs.check.probes.task_probe import probe_tasks, subsampled
from agentrl.envs.check.traces import leftovers, own_temporary_folder, present
from agentrl.tools import Tool


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Place(TypedDict):
    x: Annotated[int, Field(ge=3, lt=9)]
    names: list[str]


def everything(
    *,
    text: str,
    whole: Annotated[int, Field(gt=10, le=12)],
    part: Annotated[float, Field(gt=0, lt=1)],
    flag: bool,
    one_of: Literal["a", 3],
    colour: Colour,
    some: Annotated[list[int], Field(min_length=2, max_length=3)],
    place: Place,
    maybe: str | None,
    short: Annotated[str, Field(min_length=4, max_length=4)],
    below: Annotated[int, Field(lt=-500)],
    optional: int = 7,
) -> str:
    """Take everything."""
    return ""


SCHEMA = Tool.of(everything).schema


@given(st.integers(1, 40), st.data())
def test_the_bounds_are_those_of_wilsons_equation(n, data):
    wins = data.draw(st.integers(0, n))
    bounds = interval([1.0] * wins + [0.0] * (n - wins), (0.0, 1.0))
    assert bounds.mean == pytest.approx(wins / n)
    for p in (bounds.low, bounds.high):
        assert (p - wins / n) ** 2 == pytest.approx(Z**2 * p * (1 - p) / n, abs=1e-9)
    assert bounds.low <= wins / n <= bounds.high
    assert (bounds.high == pytest.approx(1.0)) == (wins == n)
    assert (bounds.low == pytest.approx(0.0)) == (wins == 0)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.floats(-3, 3), st.floats(0.1, 10))
def test_intervals_move_with_the_scores(scores, shift, scale):
    centred = interval(scores, (-5.0, 5.0))
    other = interval([scale * score + shift for score in scores], (scale * -5 + shift, scale * 5 + shift))
    assert other == pytest.approx([scale * value + shift for value in centred], abs=1e-6)


def test_scores_that_cannot_vary_have_no_width():
    assert interval([0.5, 0.5], (0.5, 0.5)) == (0.5, 0.5, 0.5)


@given(st.integers(0, 10**6))
def test_fitting_arguments_fit_and_come_again(seed):
    drawn = arguments.fitting(SCHEMA, random.Random(seed))
    assert drawn is not None
    jsonschema.validate(drawn, SCHEMA.parameters)
    assert drawn == arguments.fitting(SCHEMA, random.Random(seed))


def test_fitting_arguments_reach_every_choice():
    drawn = [arguments.fitting(SCHEMA, random.Random(seed)) for seed in range(60)]
    assert {draw["one_of"] for draw in drawn} == {"a", 3}
    assert {draw["colour"] for draw in drawn} == {"red", "blue"}
    assert {draw["whole"] for draw in drawn} == {11, 12}
    assert {type(draw["maybe"]) for draw in drawn} == {str, type(None)}
    assert {"optional" in draw for draw in drawn} == {True, False}


def test_wrong_types_never_fit_and_cover_every_parameter():
    base = arguments.fitting(SCHEMA, random.Random(1))
    drawn = list(arguments.wrong_types(SCHEMA, random.Random(1)))
    for wrong in drawn:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA.parameters)
    changed = {name for wrong in drawn for name in wrong if wrong[name] != base.get(name, math.nan)}
    assert changed >= set(SCHEMA.parameters["properties"])


def test_a_schema_that_nothing_fits_gives_nothing():
    impossible = SCHEMA._replace(parameters={"type": "object", "required": ["a"], "properties": {}})
    assert arguments.fitting(impossible, random.Random(0)) is None


def test_nesting_has_the_requested_depth():
    value, depth = arguments.nested(900), 0
    while value:
        (value,), depth = value, depth + 1
    assert depth == 900


def codes(*tasks, chance=0.0):
    """The findings about a split of these (prompt, answer) pairs."""
    split = {"train": [Task.ask(str(n), prompt, answer) for n, (prompt, answer) in enumerate(tasks)]}
    return [finding.code for finding in probe_tasks(split, split, None, chance, 1.0 - chance).findings]


@pytest.mark.parametrize(
    "prompt",
    [
        "The answer is Paris. Go!",
        'x {"answer": "Paris"}',
        "solution=PARIS",
        "Expected: `Paris`",
        "ground truth : Paris",
    ],
)
def test_an_answer_behind_a_label_is_a_leak_however_long_the_prompt(prompt):
    assert codes((f"{'word ' * 500}{prompt}", "Paris")) == ["answer-in-prompt"]


@pytest.mark.parametrize(
    "prompt", ["Is the answer Parisian?", "Answer: <your answer>", "The answer is Parisian."]
)
def test_words_about_answers_are_no_leak(prompt):
    assert codes((prompt, "Paris")) == []


def test_a_short_answer_counts_for_what_a_random_word_would_earn():
    assert codes(*[(f"Is {n} even, yes or no?", "yes") for n in range(9)]) == ["answer-in-prompt"]
    assert codes(*[(f"Is {n} even, yes or no?", "yes") for n in range(9)], chance=0.5) == []


def test_rare_coincidences_are_no_leak():
    tasks = [(f"Add {n} and {n * n}.", str(n + n * n)) for n in range(1, 100)]
    assert codes(*tasks, ("Add 7 and 0.", "7")) == []


def test_a_prompt_must_be_shorter_than_max_tokens():
    split = {"train": [Task.ask("one", "x" * 400, "y")]}
    assert [finding.code for finding in probe_tasks(split, split, 100, 0.0, 1.0).findings] == [
        "prompt-too-long"
    ]
    assert probe_tasks(split, split, 101, 0.0, 1.0).findings == ()


def test_of_many_tasks_evenly_spaced_ones_are_checked():
    tasks = [Task.ask(str(n), "?") for n in range(50_001)]
    sample = subsampled(tasks)
    assert 10_000 < len(sample) <= 20_000
    assert sample[0] is tasks[0]
    assert subsampled(tasks[:7]) == tasks[:7]


@pytest.mark.parametrize(
    ("held_out", "codes"),
    [
        ("HOW MANY  # are there", ["splits-nearly-overlap"]),
        ("How many  # are there?", ["splits-overlap"]),
        # A picture: the same signs elsewhere.
        ("How many #  are there?", []),
    ],
)
def test_tasks_of_two_splits_may_differ_in_more_than_case(held_out, codes):
    splits = {
        "train": [Task.ask("one", "How many  # are there?", "1")],
        "test": [Task.ask("two", held_out, "1")],
    }
    findings = probe_tasks(splits, splits, None, 0.0, 1.0).findings
    assert [finding.code for finding in findings] == codes


@pytest.mark.parametrize(("colour", "codes"), [(b"red", ["splits-nearly-overlap"]), (b"blue", [])])
def test_tasks_of_two_splits_may_differ_in_their_pictures_alone(colour, codes):
    def task(id, text, data):
        return Task(id, (Message("user", (Text(text), Image.of(data))),), "1")

    splits = {"train": [task("one", "What is it?", b"red")], "test": [task("two", "what is it", colour)]}
    findings = probe_tasks(splits, splits, None, 0.0, 1.0).findings
    assert [finding.code for finding in findings] == codes


async def test_a_thread_of_the_event_loop_is_left_behind_only_while_it_is_busy():
    done = threading.Event()
    with own_temporary_folder() as folder:
        before = present(folder)
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(2)))
        assert await leftovers(before, folder) == []
        call = asyncio.create_task(asyncio.to_thread(done.wait))
        try:
            assert "thread" in {trace.kind for trace in await leftovers(before, folder)}
        finally:
            done.set()
            await call


async def test_what_comes_and_goes_leaves_no_trace_and_what_stays_does():
    with own_temporary_folder() as folder:
        before = present(folder)
        task = asyncio.create_task(asyncio.sleep(0.05))
        assert await leftovers(before, folder) == []
        await task
        (folder / "kept").touch()
        assert await leftovers(before, folder) == [("file", "kept")]
    assert not folder.exists()
    assert os.environ.get("TMPDIR") != str(folder)
