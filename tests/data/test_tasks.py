"""The order of an environment's tasks depends only on the seed of the run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task
from agentrl.data import Prompt, PromptStream, TaskSource
from agentrl.errors import ConfigError


def tasks(n):
    return [Task.ask(f"t{k}", "?") for k in range(n)]


def stream(n, **settings):
    return PromptStream(TaskSource(tasks(n), **settings))


def drawn(prompts, n):
    return [prompts.next() for _ in range(n)]


@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(1, 4))
def test_every_epoch_is_a_permutation_of_all_tasks(n, seed, epochs):
    prompts = stream(n, seed=seed)
    for _ in range(epochs):
        assert sorted(prompt.task.id for prompt in drawn(prompts, n)) == sorted(t.id for t in tasks(n))


@given(st.integers(0, 2**32))
def test_the_order_depends_only_on_the_seed(seed):
    first = drawn(stream(7, seed=seed), 20)
    random.seed(1)
    assert drawn(stream(7, seed=seed), 20) == first


@given(st.integers(1, 9), st.integers(0, 99), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_prompts_do_not_depend_on_the_order_of_requests(n, seed, ordinals):
    source = TaskSource(tasks(n), seed=seed)
    in_order = drawn(PromptStream(TaskSource(tasks(n), seed=seed)), 61)
    assert [source.prompt(ordinal) for ordinal in ordinals] == [in_order[ordinal] for ordinal in ordinals]


def test_the_order_and_the_seeds_are_those_of_published_figures():
    # Shuffled by random.Random(f"order/{seed}/{epoch}"); seeds by random.Random(f"world/{seed}/{index}").
    assert drawn(stream(5, seed=3), 6) == [
        Prompt(k, Task.ask(f"t{index}", "?"), random.Random(f"world/3/{k}").getrandbits(31))
        for k, index in enumerate([*shuffled("order/3/0"), shuffled("order/3/1")[0]])
    ]


def shuffled(key):
    order = [*range(5)]
    random.Random(key).shuffle(order)
    return order


def test_other_seeds_and_other_epochs_have_other_orders_and_other_seeds():
    first = drawn(stream(30, seed=0), 60)
    other = drawn(stream(30, seed=1), 60)
    order = [prompt.task.id for prompt in first]
    assert order[:30] != order[30:]
    assert order != [prompt.task.id for prompt in other]
    seeds = [prompt.seed for prompt in first]
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & {prompt.seed for prompt in other}


def test_a_stream_resumes_from_its_next_ordinal():
    prompts = stream(3, seed=0)
    assert [prompt.index for prompt in drawn(prompts, 7)] == list(range(7))
    assert prompts.next_ordinal == 7
    assert PromptStream(TaskSource(tasks(3), seed=0), 7).next() == prompts.next()


def test_unshuffled_tasks_come_in_their_own_order():
    prompts = drawn(stream(3, seed=5, shuffle=False), 6)
    assert [prompt.task.id for prompt in prompts] == ["t0", "t1", "t2"] * 2


def test_a_split_without_tasks_is_refused():
    with pytest.raises(ConfigError, match="holds no tasks; name a split"):
        TaskSource([], seed=0)


def test_other_tasks_have_another_fingerprint():
    source = TaskSource(tasks(3), seed=1)
    source.check(TaskSource(tasks(3), seed=2).fingerprint)
    for others in (tasks(4), [*tasks(2), Task.ask("t2", "?", "!")]):
        with pytest.raises(ConfigError, match="restore them, or start a new run"):
            source.check(TaskSource(others).fingerprint)
