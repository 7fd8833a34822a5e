"""Streams, prompts that are too long, and custom sources."""

from __future__ import annotations

import json
import random

import pytest

from agentrl import Task
from agentrl.data import (
    AdaptiveSource,
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


def num_words(task):
    return len(task.prompt[0].text.split())


def test_a_prompt_that_is_too_long_is_counted_and_never_played():
    tasks = [Task.ask(f"t{n}", "word " * n) for n in range(1, 9)]
    unbounded = TaskSource(tasks, seed=4)
    source = Bounded(unbounded, most=6, length=num_words)
    assert (source.fingerprint, source.num_tasks) == (unbounded.fingerprint, 8)
    stream = PromptStream(source)
    played = [stream.next() for _ in range(12)]
    assert all(num_words(prompt.task) <= 6 for prompt in played)
    assert {prompt.index: prompt for prompt in played}.items() <= {
        k: unbounded.prompt(k) for k in range(stream.next_ordinal)
    }.items()
    assert stream.take_skipped() == {"prompt_too_long": stream.next_ordinal - 12}
    assert stream.take_skipped() == {}
    (longest,) = [k for k in range(8) if unbounded.task(k).id == "t8"]
    assert source.prompt(longest) == Skipped(
        longest, "prompt_too_long", "task t8 has 8 tokens, 6 are allowed"
    )
    assert source.task(longest) == source.prompt(longest)


def test_a_source_with_only_long_prompts_is_an_error():
    stream = PromptStream(Bounded(TaskSource([Task.ask("t", "a b")]), most=1, length=num_words))
    with pytest.raises(
        ConfigError, match=r"10,000 prompts in a row were skipped .* raise rollout_max_prompt_len"
    ):
        stream.next()


class Squares(DataSource):
    """A custom source."""

    fingerprint = "squares 1"

    def task(self, ordinal):
        n = random.Random(f"{self.seed}/{ordinal}").randrange(1000)
        return Task.ask(f"{ordinal}", f"What is {n} times {n}?", str(n * n))


def test_a_custom_source_needs_a_fingerprint_and_a_task_method():
    source = check_data_source(Squares, seed=7)
    prompt = source.prompt(5)
    assert isinstance(prompt, Prompt)
    assert (prompt.index, prompt.seed) == (5, world_seed(7, 5))
    assert prompt.task == Squares(seed=7).task(5)
    assert Squares(seed=8).prompt(5) != prompt
    assert source.num_tasks is None


class Counting(Squares):
    """Counts its calls, and depends on the count."""

    calls = 0

    def task(self, ordinal):
        self.calls += 1
        return Task.ask(f"{self.calls}", "?")


class Clocked(Squares):
    """Draws from the global random generator."""

    def task(self, ordinal):
        return Task.ask(f"{random.random()}", "?")


class Unnamed(Squares):
    """Has an empty fingerprint."""

    fingerprint = ""


class Renamed(Squares):
    """Has another fingerprint each time."""

    def __init__(self, *, seed):
        super().__init__(seed=seed)
        self.fingerprint = str(id(self))


class Texts(Squares):
    """Returns text in place of tasks."""

    def task(self, ordinal):
        return "What is it?"


class Empty(Squares):
    """Returns a task with an empty prompt."""

    def task(self, ordinal):
        return Task("t", ())


class Shifted(Squares):
    """Numbers its prompts from 1."""

    def prompt(self, ordinal):
        return Prompt(ordinal + 1, self.task(ordinal), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counting, "prompt .* differed when it was requested again"),
        (Clocked, "prompt .* differed when it was requested again"),
        (Unnamed, "`fingerprint` is ''"),
        (Renamed, "two fingerprints"),
        (Texts, "prompt 0 is 'What is it\\?'; `task` returns an agentrl.Task"),
        (Empty, "prompt 0 is Task"),
        (Shifted, "prompt 0 has the number 1"),
        (lambda seed: [], "it gives a list; write a subclass of agentrl.data.DataSource"),
    ],
)
def test_the_error_of_a_source_names_the_violated_rule(make, message):
    with pytest.raises(ValueError, match=message):
        check_data_source(make)


class Growing(AdaptiveSource):
    """Counts what it has heard of, in its prompts."""

    fingerprint = "growing 1"

    def __init__(self, *, seed=0):
        super().__init__(seed=seed)
        self.heard = 0

    def draw(self, ordinal):
        return Task.ask(f"{ordinal}", f"{ordinal} after {self.heard}", number=ordinal)

    def add_groups(self, groups):
        self.heard += len(groups)

    def save(self):
        return {"heard": self.heard}

    def load(self, saved):
        self.heard = saved["heard"]


class Forgetful(Growing):
    def load(self, saved):
        self.heard = 7


class Random(Growing):
    def draw(self, ordinal):
        return Task.ask(f"{ordinal}", f"{random.random()}")


def test_what_a_source_that_adapts_has_drawn_stays_and_a_saved_one_goes_on():
    source = check_data_source(Growing)
    assert [source.task(n).prompt[0].text for n in (0, 1)] == ["0 after 0", "1 after 0"]
    source.add_groups([None, None])
    assert [source.task(n).prompt[0].text for n in (1, 2, 3)] == ["1 after 0", "2 after 2", "3 after 2"]
    assert source.preview().task(9).id == "9"
    state = json.loads(json.dumps(source.state([1, 3])))
    other = Growing()
    other.restore(state)
    for one in (source, other):
        assert [one.task(n).prompt[0].text for n in (3, 1, 4)] == ["3 after 2", "1 after 0", "4 after 2"]
        assert one.task(3).metadata == {"number": 3}
        with pytest.raises(ConfigError, match="prompt 2 was drawn and is over"):
            one.task(2)


def test_a_filter_over_one_that_adapts_passes_everything_on():
    bounded = Bounded(Growing(), most=12, length=lambda task: len(task.prompt[0].text))
    bounded.add_groups([None] * 3)
    assert bounded.task(0).prompt[0].text == "0 after 3"
    other = Bounded(Growing(), most=12, length=len)
    other.restore(bounded.state([0]))
    assert other._source.heard == 3
    assert bounded.preview().task(5).id == "5"
    assert bounded._source._next == 1


@pytest.mark.parametrize("kind", [Forgetful, Random])
def test_one_that_does_not_go_on_as_it_was_is_refused(kind):
    with pytest.raises(ValueError, match="differed after `load` of what `save` returned"):
        check_data_source(kind)


def test_a_checkpoint_of_another_source_is_a_sentence():
    with pytest.raises(ConfigError, match="another source of prompts; restore data_source_path"):
        Growing().restore(None)
