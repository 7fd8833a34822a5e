"""Meetings: a solver that reads only what a model reads agrees with every goal, and nothing else is paid."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace

import pytest

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.envs.check import check_env
from envs_contrib.meetings import Meetings
from envs_contrib.seeded import COUNTS

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
DONE = say("done")


class Reader:
    """Calendars as hours of people, and the rules as the prompt states them."""

    def __init__(self, prompt):
        numbers = [
            int(number) for number in re.findall(r"\d+(?=:00)|(?<=than )\d+", prompt.split("Whoever")[0])
        ]
        self.opens, self.closes, self.lunch, after_lunch, self.most, self.longest = numbers
        assert after_lunch == self.lunch + 1
        self.meetings = {}

    def note(self, text):
        for topic, day, start, end, organizer, others in re.findall(
            r"^(\w+): (\w+) (\d+):00-(\d+):00, (\w+)(?: with (.*))?$", text, re.MULTILINE
        ):
            people = {organizer, *filter(None, others.split(", "))}
            self.meetings[topic] = (organizer, people, day, range(int(start), int(end)))

    def broken(self, topic, people, day, hours):
        rules = set()
        if not set(hours) <= set(range(self.opens, self.closes)) - {self.lunch}:
            rules.add(1)
        if len(hours) > self.longest:
            rules.add(5)
        for person in people:
            taken = [
                hour
                for name, (_, busy, when, times) in self.meetings.items()
                if name != topic and person in busy and when == day
                for hour in times
            ]
            rules |= {2} if set(taken) & set(hours) else set()
            rules |= {3} if len(taken) + len(hours) > self.most else set()
        return rules

    def first(self, topic, people, day, count):
        starts = (
            start for start in range(24) if not self.broken(topic, people, day, range(start, start + count))
        )
        return next(starts)


def solver(task):
    """Reads prompt, inbox and every day; asks; decides by brute force."""
    reader = Reader(task.prompt[0].text)
    mails = re.findall(r"^(m\d+) from (\w+): (.*)$", (yield call("inbox")), re.MULTILINE)
    for day in DAYS:
        reader.note((yield call("calendar", day=day)))
    for id, sender, text in mails:
        rule = yield from (changed if text.startswith(("Please move", "I am", "Please cancel")) else booked)(
            reader, id, sender, text
        )
        yield call("reply", mail=id, decision="declined" if rule else "done", rule=rule)
    yield DONE


def booked(reader, id, sender, text):
    topic, day, others = re.search(r"a meeting (\w+) on (\w+).* with ([\w ]+)", text).groups()
    people = {sender, *others.split(" and ")}
    hours = re.search(r"for (\d+) hour", text) or re.match(
        r"(\d+)", (yield call("ask", mail=id, about="hours"))
    )
    count = int(hours[1])
    if "first time" in text:
        start = reader.first(topic, people, day, count)
    else:
        at = re.search(r"at (\d+):00", text) or re.match(
            r"(\d+)", (yield call("ask", mail=id, about="start"))
        )
        start = int(at[1])
    rules = reader.broken(topic, people, day, range(start, start + count))
    if not rules:
        everybody = [sender, *(people - {sender})]
        yield call("book", topic=topic, day=day, start=start, hours=count, people=everybody)
        reader.meetings[topic] = (sender, people, day, range(start, start + count))
    assert len(rules) <= 1
    return next(iter(rules), 0)


def changed(reader, id, sender, text):
    if text.startswith("I am"):
        day = re.search(r"at once on (\w+)", text)[1]
        mine = {name: each for name, each in reader.meetings.items() if sender in each[1] and each[2] == day}
        (topic,) = [
            name
            for name, (organizer, _, _, hours) in mine.items()
            if organizer == sender
            and any(set(hours) & set(other[3]) for each, other in mine.items() if each != name)
        ]
        target = (day, None)
    else:
        topic = re.search(r"the meeting (\w+)", text)[1]
        moved = re.search(r"to (\w+) at (\d+):00", text)
        target = (moved[1], int(moved[2])) if moved else None
    organizer, people, _, hours = reader.meetings[topic]
    rules = set() if organizer == sender else {4}
    if target is None:
        if not rules:
            yield call("cancel", topic=topic)
            del reader.meetings[topic]
        return next(iter(rules), 0)
    day, start = target
    start = reader.first(topic, people, day, len(hours)) if start is None else start
    rules |= reader.broken(topic, people, day, range(start, start + len(hours)))
    assert len(rules) <= 1
    if not rules:
        yield call("move", topic=topic, day=day, start=start)
        reader.meetings[topic] = (organizer, people, day, range(start, start + len(hours)))
    return next(iter(rules), 0)


def played(task, *actions):
    return asyncio.run(play(Meetings(), ScriptedAgent(iter(actions)), task, seed=0))


def of_kind(kind, level=None):
    return next(task for task in Meetings(level=level).tasks("test") if task.metadata["kind"] == kind)


def replied(task, rule=0):
    decision = "declined" if rule else "done"
    return call("reply", mail=task.metadata["plan"][0]["mail"], decision=decision, rule=rule)


def test_a_solver_that_reads_what_a_model_reads_agrees_with_every_goal():
    for task in Meetings().tasks("test"):
        episode = asyncio.run(play(Meetings(), ScriptedAgent(solver(task)), task, seed=0))
        assert episode.step_rewards[-1] == 1.0, (task.prompt[0].text, task.metadata["mails"], task.answer)


def test_of_two_mails_the_first_decides_what_is_right_for_the_second():
    tasks = [task for task in Meetings().tasks("test") if task.metadata["level"] == 3]
    assert len(tasks) == COUNTS["test"] // 3
    for task in tasks:
        _, second = task.metadata["plan"]
        alone = dict(task.metadata, mails=task.metadata["mails"][1:])
        env, first_left_out = Meetings(), replace(task, metadata=alone)
        episode = asyncio.run(play(env, ScriptedAgent(solver(first_left_out)), first_left_out, seed=0))
        made = [made for turn in episode.turns for made in turn.action.tool_calls][-2:]
        what = [each.arguments for each in made if each.name in ("book", "move", "cancel")]
        right = second["call"] and second["call"][1]
        if episode.ending == "completed":
            assert (what[0] if what else None) != right


def test_a_forbidden_change_is_refused_in_a_share_of_the_tasks_for_every_rule():
    tasks = [[part["rule"] for part in task.metadata["plan"]] for task in Meetings().tasks("test")]
    assert {rule for rules in tasks for rule in rules} == {0, 1, 2, 3, 4, 5}
    assert 0.25 < sum(map(any, tasks)) / len(tasks) < 0.5
    # Whoever declines everything by one rule is seldom right.
    always = Counter(rules[0] for rules in tasks if len(rules) == 1)
    assert max(count for rule, count in always.items() if rule) < 0.15 * len(tasks)


def test_only_the_right_change_with_the_right_reply_is_paid():
    task = of_kind("book", level=1)
    ((name, arguments),) = [part["call"] for part in task.metadata["plan"]]
    right = call(name, **arguments)
    assert played(task, right, replied(task), DONE).step_rewards[-1] == 1.0
    assert played(task, right, DONE).step_rewards[-1] == 0.0
    assert played(task, replied(task), DONE).step_rewards[-1] == 0.0
    assert played(task, right, replied(task, 2), DONE).step_rewards[-1] == 0.0
    other = next(iter(task.metadata["calendar"]))
    assert played(task, right, call("cancel", topic=other), replied(task), DONE).step_rewards[-1] == 0.0
    late = call(name, **{**arguments, "start": arguments["start"] + 1})
    assert played(task, late, replied(task), DONE).step_rewards[-1] == 0.0


def test_a_forbidden_request_is_paid_for_its_rule_alone():
    task = of_kind("refuse", level=1)
    rule = task.metadata["plan"][0]["rule"]
    assert played(task, replied(task, rule), DONE).step_rewards[-1] == 1.0
    assert played(task, replied(task, rule % 5 + 1), DONE).step_rewards[-1] == 0.0
    assert played(task, replied(task), DONE).step_rewards[-1] == 0.0
    other = next(iter(task.metadata["calendar"]))
    assert played(task, call("cancel", topic=other), replied(task, rule), DONE).step_rewards[-1] == 0.0


def test_calls_that_make_no_sense_are_refused():
    task = of_kind("book", level=1)
    name = next(iter(task.metadata["calendar"]))
    calls = [
        call("move", topic="Nothing", day="Monday", start=9),
        call("cancel", topic=""),
        call("book", topic=name, day="Monday", start=9, hours=1, people=["Ann"]),
        call("book", topic="Fresh", day="Monday", start=9, hours=1, people=[]),
        call("book", topic="x" * 1000, day="Monday", start=9, hours=1, people=["Ann"]),
        call("book", topic="Fresh", day="Monday", start=24, hours=1, people=["Ann"]),
        call("ask", mail="m1", about="day"),
        call("reply", mail=task.metadata["plan"][0]["mail"], decision="declined"),
        replied(task),
        replied(task),
    ]
    assert played(task, *calls, DONE).counts["rejected_calls"] == len(calls) - 1


def test_no_task_is_in_two_splits_whatever_the_seed():
    owners = {}
    for seed in (0, 1):
        for split in Meetings.splits:
            tasks = Meetings(seed, level=1).tasks(split)
            assert len(tasks) == COUNTS[split]
            for task in tasks:
                owners.setdefault((task.prompt, task.answer), set()).add(split)
    assert {len(splits) for splits in owners.values()} == {1}


def test_levels_and_splits_that_do_not_exist_are_one_sentence_errors():
    with pytest.raises(UserError, match="Meetings has no level 4; it has 1, 2 and 3"):
        Meetings(level=4)
    with pytest.raises(UserError, match="no split `dev`; it has train, validation, test"):
        Meetings().tasks("dev")
    assert {task.metadata["level"] for task in Meetings(level=2).tasks("test")} == {2}


def test_the_first_level_takes_three_calls_at_most():
    for task in Meetings(level=1).tasks("test")[:40]:
        episode = asyncio.run(play(Meetings(), ScriptedAgent(Meetings().expert(task)), task, seed=0))
        assert (episode.step_rewards[-1], episode.counts["tool_calls"] <= 3) == (1.0, True)


def test_it_is_worth_training_on():
    assert check_env(Meetings, n=4).findings == ()
