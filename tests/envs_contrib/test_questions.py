"""Weekdays by multiple choice, checked against the calendar itself."""

from __future__ import annotations

import datetime
import re
from collections import Counter

import pytest

from agentrl import ScriptedAgent, make, play
from envs_contrib.questions import CalendarQuestions
from envs_contrib.questions.env import DAYS, LETTERS, NUM_QUESTIONS

MONDAY = datetime.date(2024, 1, 1)
QUESTIONS = CalendarQuestions()


@pytest.mark.parametrize("split", NUM_QUESTIONS)
def test_the_right_letter_is_that_of_the_calendar(split):
    for task in QUESTIONS.tasks(split):
        text = task.prompt[0].content
        today, when, past = re.match(
            r"Today is (\w+)\. Which day (?:will it be in|was it) (\d+) days( ago)?\?", text
        ).groups()
        then = MONDAY + datetime.timedelta(DAYS.index(today) + int(when) * (-1 if past else 1))
        choices = dict(re.findall(r"^([A-D])\) (\w+)$", text, re.MULTILINE))
        assert choices[task.answer] == then.strftime("%A")
        assert len(set(choices.values())) == len(choices) == 4
        assert task.split == split


def test_splits_are_of_the_declared_size_and_share_nothing():
    tasks = {split: QUESTIONS.tasks(split) for split in QUESTIONS.splits}
    assert {split: len(of_split) for split, of_split in tasks.items()} == NUM_QUESTIONS
    pairs = [
        (task.metadata["today"], task.metadata["days"]) for of_split in tasks.values() for task in of_split
    ]
    assert len(set(pairs)) == len(pairs)


def test_every_letter_is_right_one_time_in_four():
    counts = Counter(task.answer for task in QUESTIONS.tasks("train"))
    assert set(counts) == set(LETTERS)
    assert all(abs(count - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    assert QUESTIONS.chance_score == 0.25


def test_one_seed_is_one_set_of_questions():
    assert CalendarQuestions(3).tasks("test") == CalendarQuestions(3).tasks("test")
    assert CalendarQuestions(3).tasks("test") != CalendarQuestions(4).tasks("test")


@pytest.mark.parametrize(
    ("form", "worth"),
    [("{}", 1), (" ({}).\n", 1), ("{})", 1), ("{} or so", 0), ("", 0), ("ABCD", 0), ("A B C D", 0)],
)
def test_a_letter_counts_and_nothing_else(form, worth):
    task = QUESTIONS.tasks("test")[0]
    assert QUESTIONS.grade(task, form.format(task.answer)) == worth
    assert QUESTIONS.grade(task, form.format(task.answer.lower())) == worth


async def test_the_expert_is_always_right_in_one_turn():
    for task in QUESTIONS.tasks("test")[:50]:
        env = make("CalendarQuestions-v0")
        assert (await play(env, ScriptedAgent(env.expert(task)), task)).step_rewards == (1.0,)


def test_no_single_answer_beats_chance_by_much():
    tasks = QUESTIONS.tasks("test")
    for answer in LETTERS:
        assert sum(QUESTIONS.grade(task, answer) for task in tasks) / len(tasks) == pytest.approx(
            0.25, abs=0.06
        )
