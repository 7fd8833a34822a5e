"""Which task comes next depends on the run's seed alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task
from agentrl.errors import ConfigError
from agentrl.rollout.data import TaskStream


def tasks(n):
    return [Task.ask(f"t{k}", "?") for k in range(n)]


def drawn(stream, n):
    return [stream.next() for _ in range(n)]


@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(1, 4))
def test_every_epoch_is_a_permutation_of_all_tasks(n, seed, epochs):
    stream = TaskStream(tasks(n), seed=seed)
    for _ in range(epochs):
        assert sorted(prompt.task.id for prompt in drawn(stream, n)) == sorted(t.id for t in tasks(n))


@given(st.integers(0, 2**32))
def test_the_seed_alone_decides(seed):
    first = drawn(TaskStream(tasks(7), seed=seed), 20)
    random.seed(1)
    assert drawn(TaskStream(tasks(7), seed=seed), 20) == first


def test_other_seeds_and_other_epochs_have_other_orders_and_other_worlds():
    first = drawn(TaskStream(tasks(30), seed=0), 60)
    other = drawn(TaskStream(tasks(30), seed=1), 60)
    order = [prompt.task.id for prompt in first]
    assert order[:30] != order[30:]
    assert order != [prompt.task.id for prompt in other]
    worlds = [prompt.seed for prompt in first]
    assert len(set(worlds)) == len(worlds)
    assert not set(worlds) & {prompt.seed for prompt in other}


def test_prompts_are_numbered_through():
    assert [prompt.index for prompt in drawn(TaskStream(tasks(3), seed=0), 7)] == list(range(7))


def test_unshuffled_tasks_come_in_their_own_order():
    stream = TaskStream(tasks(3), seed=5, shuffle=False)
    assert [prompt.task.id for prompt in drawn(stream, 6)] == ["t0", "t1", "t2"] * 2


def test_a_split_without_tasks_is_refused():
    with pytest.raises(ConfigError, match="holds no tasks; name a split"):
        TaskStream([], seed=0)
