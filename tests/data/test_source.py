"""Streams, prompts that are too long, and sources of one's own."""

from __future__ import annotations

import random

import pytest

from agentrl import Task
from agentrl.data import (
    Bounded,
    DataSource,
    Prompt,
    PromptStream,
    Skipped,
    TaskSource,
    check_data_source,
    world_seed,
)
from agentrl.errors import ConfigError


def words(task):
    return len(task.prompt[0].text.split())


def test_a_prompt_that_is_too_long_is_counted_and_never_played():
    tasks = [Task.ask(f"t{n}", "word " * n) for n in range(1, 9)]
    whole = TaskSource(tasks, seed=4)
    source = Bounded(whole, most=6, length=words)
    assert (source.fingerprint, source.num_tasks) == (whole.fingerprint, 8)
    stream = PromptStream(source)
    played = [stream.next() for _ in range(12)]
    assert all(words(prompt.task) <= 6 for prompt in played)
    assert {prompt.index: prompt for prompt in played}.items() <= {
        k: whole.prompt(k) for k in range(stream.next_ordinal)
    }.items()
    assert stream.take_skipped() == {"prompt_too_long": stream.next_ordinal - 12}
    assert stream.take_skipped() == {}
    (longest,) = [k for k in range(8) if whole.task(k).id == "t8"]
    assert source.prompt(longest) == Skipped(
        longest, "prompt_too_long", "task t8 has 8 tokens, 6 are allowed"
    )
    assert source.task(longest) == source.prompt(longest)


def test_a_source_of_which_nothing_fits_ends_in_a_sentence():
    stream = PromptStream(Bounded(TaskSource([Task.ask("t", "a b")]), most=1, length=words))
    with pytest.raises(
        ConfigError, match=r"10,000 prompts in a row were skipped .* raise rollout_max_prompt_len"
    ):
        stream.next()


class Squares(DataSource):
    """A source of one's own."""

    fingerprint = "squares 1"

    def task(self, ordinal):
        n = random.Random(f"{self.seed}/{ordinal}").randrange(1000)
        return Task.ask(f"{ordinal}", f"What is {n} times {n}?", str(n * n))


def test_a_source_of_ones_own_is_a_class_with_two_things():
    source = check_data_source(Squares, seed=7)
    found = source.prompt(5)
    assert isinstance(found, Prompt)
    assert (found.index, found.seed) == (5, world_seed(7, 5))
    assert found.task == Squares(seed=7).task(5)
    assert Squares(seed=8).prompt(5) != found
    assert source.num_tasks is None


class Counting(Squares):
    """Remembers how often it was called."""

    calls = 0

    def task(self, ordinal):
        self.calls += 1
        return Task.ask(f"{self.calls}", "?")


class Clocked(Squares):
    """Draws from everybody's generator."""

    def task(self, ordinal):
        return Task.ask(f"{random.random()}", "?")


class Unnamed(Squares):
    """Says nothing of its content."""

    fingerprint = ""


class Renamed(Squares):
    """Has another fingerprint each time."""

    def __init__(self, *, seed):
        super().__init__(seed=seed)
        self.fingerprint = str(id(self))


class Texts(Squares):
    """Gives text in place of tasks."""

    def task(self, ordinal):
        return "What is it?"


class Empty(Squares):
    """A task that asks nothing."""

    def task(self, ordinal):
        return Task("t", ())


class Shifted(Squares):
    """Numbers its prompts from 1."""

    def prompt(self, ordinal):
        return Prompt(ordinal + 1, self.task(ordinal), 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Counting, "prompt .* was another when it was asked for again"),
        (Clocked, "prompt .* was another when it was asked for again"),
        (Unnamed, "`fingerprint` is ''"),
        (Renamed, "two fingerprints"),
        (Texts, "prompt 0 is 'What is it\\?'; `task` returns an agentrl.Task"),
        (Empty, "prompt 0 is Task"),
        (Shifted, "prompt 0 has the number 1"),
        (lambda seed: [], "it gives a list; write a subclass of agentrl.data.DataSource"),
    ],
)
def test_a_source_that_breaks_a_promise_is_told_which(make, says):
    with pytest.raises(ValueError, match=says):
        check_data_source(make)
