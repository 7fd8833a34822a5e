"""Mixtures of sources: the share of each source after any number of draws."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task
from agentrl.data import DataSource, Mixture, Prompt, Skipped, TaskSource
from agentrl.data.mixture import integer_shares, schedule
from agentrl.errors import ConfigError


def source(name, n, **settings):
    return TaskSource([Task.ask(f"{name}{k}", "?") for k in range(n)], **settings)


SHARES = st.lists(st.integers(1, 12), min_size=1, max_size=7)


@given(SHARES)
def test_after_every_draw_counts_match_the_shares_within_one(shares):
    counts = [0] * len(shares)
    total = sum(shares)
    for n, turn in enumerate(schedule(shares), start=1):
        counts[turn] += 1
        assert all(abs(counts[k] - n * share / total) < 1 for k, share in enumerate(shares))
    assert counts == shares


@given(SHARES, st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_turns_do_not_depend_on_earlier_calls(shares, ordinals):
    mixture = Mixture([source(str(k), 1) for k in range(len(shares))], shares)
    counts, turns = Counter(), []
    for ordinal in range(501):
        chosen = mixture.turn(ordinal)[0]
        turns.append((chosen, counts[chosen]))
        counts[chosen] += 1
    assert [mixture.turn(ordinal) for ordinal in ordinals] == [turns[ordinal] for ordinal in ordinals]


def test_every_source_goes_through_epochs_of_its_own():
    mixture = Mixture([source("a", 3, seed=1), source("b", 50, seed=1)], [1, 2], seed=1)
    drawn = [mixture.prompt(k) for k in range(90)]
    assert [prompt.index for prompt in drawn] == list(range(90))
    names = [prompt.task.id for prompt in drawn]
    small = [name for name in names if name.startswith("a")]
    large = [name for name in names if name.startswith("b")]
    assert (len(small), len(large)) == (30, 60)
    assert all(sorted(small[k : k + 3]) == ["a0", "a1", "a2"] for k in range(0, 30, 3))
    assert len(set(large[:50])) == 50


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1.0], (1,)),
        ([2, 1], (2, 1)),
        ([0.7, 0.3], (7, 3)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([6, 4], (3, 2)),
    ],
)
def test_weights_become_integer_shares(weights, shares):
    assert integer_shares(weights) == shares


@pytest.mark.parametrize(
    ("weights", "message"), [([1, 1e-9], "must be above .001"), ([1 / 997, 1 / 991, 1 / 983], "too fine")]
)
def test_weights_without_a_schedule_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        integer_shares(weights)


def test_the_fingerprint_depends_on_the_parts_and_their_shares():
    parts = [source("a", 3), source("b", 4)]
    first = Mixture(parts, [1, 2]).fingerprint
    assert Mixture([source("a", 3), source("b", 4)], [2, 4]).fingerprint == first
    assert Mixture(parts, [2, 1]).fingerprint != first
    assert Mixture([parts[0], source("b", 5)], [1, 2]).fingerprint != first


class Gaps(DataSource):
    """Every other number has no task."""

    fingerprint = "gaps"

    def task(self, ordinal):
        return Skipped(ordinal, "odd") if ordinal % 2 else Task.ask(f"{ordinal}", "?")


def test_skipped_numbers_of_a_source_have_the_number_of_the_mixture():
    mixture = Mixture([source("a", 1), Gaps()], [1, 1])
    assert isinstance(mixture.prompt(1), Prompt)
    assert mixture.prompt(3) == Skipped(3, "odd")
