"""Desk: the goal of each task is what its sentence says, and only a diary that is right is paid."""

from __future__ import annotations

import asyncio
import re
from collections import Counter

import pytest

from agentrl import ScriptedAgent, call, play, say
from agentrl.envs.check import check_env
from envs_contrib.desk import Desk

SPLITS = ("train", "validation", "test")
DONE = say("done")


def goal_of(task):
    """From the words alone: who had that hour loses it, and everybody has one hour."""
    hour, person = re.fullmatch(r"Give (\d+) to (\w+)\.", task.prompt[0].text).groups()
    kept = {at: who for at, who in task.metadata["diary"].items() if at != hour and who != person}
    diary = kept | {hour: person}
    return ", ".join(f"{at} {diary.get(str(at), 'free')}" for at in (9, 10, 11, 12, 1, 2))


def played(task, *actions):
    return asyncio.run(play(Desk(), ScriptedAgent(iter(actions)), task, seed=0))


def test_every_goal_is_what_the_sentence_says_and_differs_from_the_diary():
    for split in SPLITS:
        for task in Desk().tasks(split):
            assert task.answer == goal_of(task)
            before = task.metadata["diary"]
            assert before != {
                part.split()[0]: part.split()[1] for part in task.answer.split(", ") if "free" not in part
            }
            hour, person = str(task.metadata["hour"]), task.metadata["person"]
            ways = {"free": (False, False), "taken": (True, False), "moves": (False, True)}
            assert (hour in before, person in before.values()) == ways[task.metadata["kind"]]


def test_the_splits_are_disjoint_and_a_third_of_each_is_of_each_kind():
    seen = [{(task.prompt[0].text, task.answer) for task in Desk().tasks(split)} for split in SPLITS]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 2100
    for split in SPLITS:
        counts = Counter(task.metadata["kind"] for task in Desk().tasks(split))
        assert len(set(counts.values())) == 1


@pytest.mark.parametrize("kind", ["free", "taken", "moves"])
def test_booking_without_looking_is_right_only_where_nothing_is_in_the_way(kind):
    task = next(task for task in Desk().tasks("test") if task.metadata["kind"] == kind)
    hour, person = task.metadata["hour"], task.metadata["person"]
    episode = played(task, call("book", hour=hour, person=person), DONE)
    assert episode.step_rewards[-1] == float(kind == "free")
    assert episode.counts.get("rejected_calls", 0) == int(kind != "free")
    expert = asyncio.run(play(Desk(), ScriptedAgent(Desk().expert(task)), task, seed=0))
    assert expert.step_rewards[-1] == 1.0
    # One booking too many is cancelled.
    other = next(at for at, who in task.metadata["diary"].items() if at != str(hour) and who != person)
    assert played(task, call("cancel", hour=int(other)), DONE).step_rewards[-1] == 0.0


def test_it_is_worth_training_on():
    assert check_env(Desk, n=4).findings == ()
