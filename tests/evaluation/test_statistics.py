"""Estimates against brute force, scipy and simulation."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from agentrl.evaluation.statistics import (
    ks_of,
    mean_of,
    paired_difference,
    pass_at_k,
    pass_of,
    pooled,
    units_of,
)

TRIALS = 400


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_with_a_solved_episode(n):
    for c in range(n + 1):
        solved = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(solved, k))
            assert len(subsets) == comb(n, k)
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_what_is_no_sample(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def test_pass_at_k_of_many_episodes_is_exact():
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    assert pass_at_k(200, 0, 200) == 0.0
    assert pass_at_k(200, 1, 200) == 1.0


def test_pass_of_leaves_out_tasks_with_too_few_episodes_and_counts_whole_successes():
    units = played_once([[1.0, 0.0], [0.0, 0.0], [1.0]])
    assert pass_of(units, 1).value == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert pass_of(units, 2).value == pytest.approx(0.5)
    assert pass_of(units, 3) is None
    assert pass_of(played_once([[0.9, 0.2]]), 2).value == 0.0


def played_once(scores):
    """The units of tasks, each in one world."""
    return units_of((f"t{n}", f"t{n}", score) for n, task in enumerate(scores) for score in task)


def test_a_task_in_ten_worlds_is_one_task():
    """Its worlds are alike here, so they say nothing more, and the interval is as wide."""
    rng = np.random.default_rng(1)
    solved = [float(score) for score in rng.random(30) < 0.4]
    often = units_of((f"t{n}", f"w{world}", score) for world in range(10) for n, score in enumerate(solved))
    once = mean_of([[score] for score in solved])
    estimate = mean_of([*pooled(often).values()])
    assert estimate.value == pytest.approx(once.value)
    assert estimate.high - estimate.low == pytest.approx(once.high - once.low, rel=0.1)
    assert pass_of(often, 1)[:3] == pytest.approx(estimate[:3])


def test_of_a_single_task_its_worlds_are_what_varies():
    units = units_of(("t", f"w{n}", float(n % 2)) for n in range(20))
    assert mean_of([*pooled(units).values()]) == mean_of([[float(n % 2)] for n in range(20)])


@pytest.mark.parametrize(
    ("n", "ks"), [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])]
)
def test_the_k_are_powers_of_two_and_all_samples(n, ks):
    assert ks_of(n) == ks


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_the_interval_of_scores_of_0_and_1_is_wilsons(case):
    n, solved = case
    estimate = mean_of([[1.0]] * solved + [[0.0]] * (n - solved))
    oracle = stats.binomtest(solved, n).proportion_ci(0.95, method="wilson")
    assert estimate.method == "wilson"
    assert (estimate.low, estimate.high) == pytest.approx((oracle.low, oracle.high), abs=1e-6)


def test_the_bootstrap_is_scipys():
    rng = np.random.default_rng(1)
    scores = rng.gamma(2.0, size=40)
    estimate = mean_of([[float(score)] for score in scores])
    oracle = stats.bootstrap(
        (scores,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert estimate.method == "bootstrap"
    assert estimate.value == pytest.approx(scores.mean())
    assert (estimate.low, estimate.high) == pytest.approx((oracle.low, oracle.high), abs=0.03)


def test_tasks_are_resampled_not_episodes():
    """Eight equal episodes of a task are worth one."""
    rng = np.random.default_rng(1)
    scores = [float(score) for score in rng.normal(size=30)]
    once, often = mean_of([[s] for s in scores]), mean_of([[s] * 8 for s in scores])
    assert often[:3] == pytest.approx(once[:3])


@pytest.mark.parametrize("scores", [[[1.0, 1.0]] * 6, [[0.0, 0.0]] * 6])
def test_where_all_agree_the_interval_is_that_of_one_episode_for_each_task(scores):
    estimate = mean_of(scores)
    assert estimate == mean_of([task[:1] for task in scores])
    assert estimate.high - estimate.low > 0.3


def test_nothing_has_no_estimate_and_one_task_a_wide_one():
    assert mean_of([]) is None
    assert mean_of([[], []]) is None
    estimate = mean_of([[1.0, 0.0]])
    assert estimate.value == 0.5
    assert estimate.high - estimate.low > 0.5


def test_a_paired_difference_is_over_common_tasks_and_does_not_vary_with_them():
    hard = {f"t{n}": [n / 100] for n in range(50)}
    better = {task: [1.1 * score + 0.1] for task, (score,) in hard.items()} | {"only here": [9.0]}
    estimate = paired_difference(hard, better)
    assert estimate.value == pytest.approx(0.1245)
    assert 0.001 < estimate.high - estimate.low < 0.01
    assert paired_difference(better, hard).value == pytest.approx(-0.1245)
    assert paired_difference(hard, {"other": [1.0]}) is None
    assert paired_difference(hard, {"t0": []}) is None


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_difference_that_all_tasks_have_is_as_wide_as_what_they_may_have_missed(offset):
    """Of 20 tasks with none that differs, the upper bound of the share that does is Wilson's for 0 of 20."""
    first = {f"t{n}": [0.0 if offset else float(n % 2)] for n in range(20)}
    estimate = paired_difference(first, {task: [score + offset] for task, (score,) in first.items()})
    share = stats.binomtest(0, 20).proportion_ci(0.95, method="wilson").high
    expected = (offset, offset - share * (1 + offset), offset + share * (1 - offset))
    assert estimate[:3] == pytest.approx(expected)
    assert estimate.method == "wilson"


def coverage(sample, truth):
    """The share of samples whose interval holds the truth."""
    estimates = [sample(np.random.default_rng(seed)) for seed in range(TRIALS)]
    return np.mean([estimate.low <= truth <= estimate.high for estimate in estimates])


@pytest.mark.full
def test_intervals_of_means_hold_the_truth_in_95_of_100_samples():
    """Tasks of Beta(2, 3) difficulty, four episodes each: the mean is 0.4."""

    def sample(rng):
        return mean_of(rng.binomial(1, rng.beta(2, 3, size=(64, 1)), size=(64, 4)).astype(float).tolist())

    assert 0.92 <= coverage(sample, 0.4) <= 0.98


@pytest.mark.full
def test_intervals_of_pass_at_k_hold_the_truth_in_95_of_100_samples():
    """pass@2 is 1 - E[(1 - p)^2] = 1 - b (b + 1) / ((a + b) (a + b + 1)) for p of Beta(a, b)."""

    def sample(rng):
        drawn = rng.binomial(1, rng.beta(2, 3, size=(64, 1)), size=(64, 4)).astype(float).tolist()
        return pass_of(played_once(drawn), 2)

    assert 0.92 <= coverage(sample, 1 - 3 * 4 / (5 * 6)) <= 0.98


@pytest.mark.full
def test_intervals_of_differences_hold_the_truth_in_95_of_100_samples():
    def sample(rng):
        difficulty = rng.beta(2, 3, size=64)
        first, second = (
            {str(k): [float(s)] for k, s in enumerate(rng.random(64) < difficulty * factor)}
            for factor in (1.0, 0.5)
        )
        return paired_difference(first, second)

    assert 0.92 <= coverage(sample, -0.2) <= 0.98
