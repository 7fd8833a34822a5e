"""BNPO against loops over groups, and torch's Beta distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, variance

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributions import Beta

from agentrl.algorithms.baselines import dr_grpo
from agentrl.algorithms.group_relative import BetaNormalized, GroupRelative
from agentrl.algorithms.rewards import KlPenalty
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, close, only_on_mask, walk


def scaled(drawn: Batch) -> Batch:
    """The batch, with rewards between 0 and 1."""
    groups = [
        replace(group, verdicts=tuple(replace(v, total=v.total / 4, turn_rewards=()) for v in group.verdicts))
        for group in drawn.groups
    ]
    return drawn._replace(groups=groups)


def naive(drawn: Batch) -> dict[str, float]:
    """The advantage of each episode: arXiv 2506.02864, and the bounds of its authors' code."""
    means = [fmean(v.total for v in g.verdicts) for g in drawn.groups if len(g.verdicts) > 1]
    a = b = 0.0
    if len(set(means)) > 1:
        mean = fmean(means)
        size = min(mean * (1 - mean) / variance(means) - 1, 1e8)
        a, b = size * mean, size * (1 - mean)
    shape = torch.tensor([max(1 + a / 3, 1), max(1 + b / 3, 1)], dtype=torch.float64)
    density = Beta(*shape, validate_args=False)
    advantages = {}
    for group in drawn.groups:
        p = fmean(v.total for v in group.verdicts)
        for verdict in group.verdicts:
            alike = len({v.total for v in group.verdicts}) == 1
            at_p = math.exp(density.log_prob(torch.tensor(p, dtype=torch.float64)))
            advantages[verdict.episode_id] = 0.0 if alike else (verdict.total - p) / max(at_p, 1e-6)
    return advantages


@given(drawn=batches().map(scaled))
def test_advantages_agree_with_loops_over_groups(drawn):
    arrays, expected = drawn.credit(BetaNormalized()).advantages, naive(drawn)
    assert all(only_on_mask(drawn.samples, arrays))
    for id, tokens in walk(drawn.samples).items():
        for token in tokens:
            actual = float(arrays[token.sample][token.position])
            assert actual == pytest.approx(expected[id.episode], rel=1e-4, abs=1e-6)


def test_a_group_with_an_unusual_mean_counts_for_more():
    rewards = [(0, 1, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1), (1, 0, 1, 0)]
    drawn = batch(*([EpisodeSpec((1,), float(r)) for r in group] for group in rewards))
    weights = []
    for estimator in (BetaNormalized(), GroupRelative(dr_grpo)):
        arrays = drawn.credit(estimator).advantages
        weights.append(np.abs([float(array.sum()) for array in arrays]).reshape(len(rewards), 4).mean(1))
    usual, unusual = (weights[0] / weights[1])[[0, 2, 4]], (weights[0] / weights[1])[[1, 3]]
    assert usual == pytest.approx(usual[0])
    assert min(unusual) > 1.1 * usual[0]


def test_where_groups_cannot_be_compared_nothing_is_normalised():
    alone = batch([EpisodeSpec((1, 2), 1.0), EpisodeSpec((3,), 0.0)])
    alike = batch(*[[EpisodeSpec((1,), 1.0), EpisodeSpec((2,), 0.0)]] * 3)
    for drawn in (alone, alike):
        plain = drawn.credit(GroupRelative(dr_grpo)).advantages
        assert close(drawn.credit(BetaNormalized()).advantages, plain)


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6, 1e-9, 1e-14])
def test_means_that_are_nearly_equal_give_finite_advantages(gap):
    groups = [[EpisodeSpec((1,), 0.5 + n * gap), EpisodeSpec((2,), 0.25)] for n in range(4)]
    drawn = batch(*groups)
    arrays, expected = drawn.credit(BetaNormalized()).advantages, naive(drawn)
    for id, tokens in walk(drawn.samples).items():
        for token in tokens:
            actual = float(arrays[token.sample][token.position])
            assert actual == pytest.approx(expected[id.episode], rel=1e-4, abs=1e-9)


def test_a_penalty_is_subtracted_as_from_any_other():
    drawn = batch([EpisodeSpec((1, 2), 1.0), EpisodeSpec((3,), 0.0)])
    estimators = (BetaNormalized(KlPenalty(0.2)), GroupRelative(dr_grpo, KlPenalty(0.2)))
    assert close(*(drawn.credit(estimator).advantages for estimator in estimators))


@pytest.mark.parametrize("reward", [-0.1, 1.5])
def test_rewards_that_are_no_probability_are_refused(reward):
    drawn = batch([EpisodeSpec((1,), reward), EpisodeSpec((1,), 0.0)])
    with pytest.raises(ValueError, match=r"bnpo needs rewards between 0 and 1, got .*shape them"):
        drawn.credit(BetaNormalized())
