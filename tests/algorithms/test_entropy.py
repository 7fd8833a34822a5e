"""Entropy control against loops over tokens."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.entropy import ClipCov, KlCov, TopEntropy
from agentrl.algorithms.estimators import Adjusted
from agentrl.algorithms.group_relative import GroupRelative
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, flat

CONTROLS = {
    "clip_cov": ClipCov(0.2, 0.05, 2.0),
    "kl_cov": KlCov(0.2, 0.7),
    "top_entropy": TopEntropy(0.4),
}


def advantages_of(drawn: Batch) -> list[float]:
    return flat(drawn, drawn.credit(GroupRelative()).advantages)


def covariances(drawn: Batch) -> list[float]:
    advantages, logprobs = advantages_of(drawn), flat(drawn, drawn.scores.proximal)
    if not advantages:
        return []
    return [
        (a - fmean(advantages)) * (x - fmean(logprobs)) for a, x in zip(advantages, logprobs, strict=True)
    ]


def controlled(drawn: Batch, control):
    return control(np.array(advantages_of(drawn)), drawn.tokens, drawn.token_scores)


@given(drawn=batches(), ratio=st.floats(0.01, 1.0))
def test_a_few_tokens_of_high_covariance_lose_their_gradient(drawn, ratio):
    factors, metrics, held = controlled(drawn, ClipCov(ratio, 0.05, 0.8))
    candidates = [n for n, c in enumerate(covariances(drawn)) if 0.05 < c < 0.8]
    lost = np.flatnonzero(factors == 0).tolist()
    assert set(lost) <= set(candidates)
    assert len(lost) == min(len(candidates), max(int(ratio * len(factors)), 1))
    assert held is None
    assert set(factors) <= {0.0, 1.0}
    assert metrics["clip_cov_fraction"] == len(lost) / max(len(factors), 1)


def test_which_of_them_is_chance():
    drawn = [
        [batch([EpisodeSpec([6], 1.0), EpisodeSpec([6], 0.0)], [EpisodeSpec([k % 3 + 1], 0.0)], seed=k)]
        for k in range(200)
    ]
    ranks = []
    for (one,) in drawn:
        order = np.argsort(np.argsort([-c for c in covariances(one)]))
        factors = controlled(one, ClipCov(0.01, -math.inf, math.inf)).factors_N
        (lost,) = np.flatnonzero(factors == 0)
        ranks.append(order[lost] / (len(factors) - 1))
    assert 0.4 < fmean(ranks) < 0.6
    assert len(set(ranks)) > 10


@given(drawn=batches(), ratio=st.floats(0.01, 1.0))
def test_the_tokens_of_the_highest_covariance_are_held(drawn, ratio):
    factors, metrics, held = controlled(drawn, KlCov(ratio, 0.7))
    expected = sorted(covariances(drawn), reverse=True)
    number = min(max(int(ratio * len(factors)), 1), len(factors))
    chosen = np.flatnonzero(held)
    assert np.all(factors == 1)
    assert set(held) <= {0.0, 0.7}
    assert sorted((covariances(drawn)[n] for n in chosen), reverse=True) == pytest.approx(expected[:number])
    assert metrics["kl_cov_fraction"] == number / max(len(factors), 1)


@given(drawn=batches(), quantile=st.floats(0.01, 1.0))
def test_only_the_most_uncertain_tokens_keep_their_gradient(drawn, quantile):
    factors, metrics, _ = controlled(drawn, TopEntropy(quantile))
    entropies = flat(drawn, drawn.scores.entropy)
    number = math.ceil(quantile * len(entropies))
    lowest = sorted(entropies, reverse=True)[number - 1] if entropies else 0.0
    assert factors.tolist() == [1.0 if entropy >= lowest else 0.0 for entropy in entropies]
    assert metrics["top_entropy_threshold"] == pytest.approx(lowest)


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_keeps_the_contract_of_an_estimator(name):
    check_estimator(Adjusted(GroupRelative(), control=CONTROLS[name]))


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_changes_what_it_says_and_nothing_else(name):
    drawn = batch(
        [EpisodeSpec([3, 2], 1.0), EpisodeSpec([4], 0.0)], [EpisodeSpec([2], 0.5), EpisodeSpec([3, 1], 0.0)]
    )
    tokens, scores = drawn.tokens, drawn.token_scores
    plain = GroupRelative()(drawn.groups, tokens, scores)
    adjusted = Adjusted(GroupRelative(), control=CONTROLS[name])(drawn.groups, tokens, scores)
    factors, metrics, held = CONTROLS[name](plain.advantages_N, tokens, scores)
    assert adjusted.advantages_N.tolist() == (plain.advantages_N * factors).tolist()
    assert (adjusted.kl_cov_N is None) == (held is None) == (name != "kl_cov")
    assert metrics.items() <= adjusted.metrics.items()
    assert (factors.sum() < len(factors)) == (name != "kl_cov")


def test_entropies_are_needed_by_the_one_that_compares_them():
    drawn = batch([EpisodeSpec([2], 1.0), EpisodeSpec([3], 0.0)])
    with pytest.raises(ValueError, match="needs the entropies of the policy"):
        TopEntropy()(np.ones(5), drawn.tokens, drawn.token_scores._replace(entropy_N=None))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ClipCov(0.0), "a share above 0"),
        (lambda: ClipCov(low=2.0, high=2.0), "low < high"),
        (lambda: KlCov(1.5), "a share above 0"),
        (lambda: KlCov(coef=0.0), "coef above 0"),
        (lambda: TopEntropy(0.0), "a share above 0"),
    ],
)
def test_controls_that_make_no_sense_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
