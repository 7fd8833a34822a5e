import statistics
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.baselines import BASELINES, dr_grpo, grpo, grpo_passk, maxrl, rloo

rewards = st.lists(st.floats(0, 100).map(lambda r: round(r, 3)), min_size=2, max_size=9)


def naive_grpo(rewards_G):
    mean, spread = statistics.fmean(rewards_G), statistics.stdev(rewards_G)
    return [(reward - mean) / (spread + 1e-6) for reward in rewards_G]


def naive_dr_grpo(rewards_G):
    return [reward - statistics.fmean(rewards_G) for reward in rewards_G]


def naive_rloo(rewards_G):
    advantages = []
    for i, reward in enumerate(rewards_G):
        others = [other for j, other in enumerate(rewards_G) if j != i]
        advantages.append(reward - sum(others) / len(others))
    return advantages


def naive_maxrl(rewards_G):
    mean = statistics.fmean(rewards_G)
    return [(reward - mean) / mean if mean > 0 else 0.0 for reward in rewards_G]


def naive_grpo_passk(rewards_G):
    without = [max([*rewards_G[:i], *rewards_G[i + 1 :]]) for i in range(len(rewards_G))]
    spread = statistics.stdev(rewards_G) + 1e-6
    return [(max(rewards_G) - other) / spread for other in without]


NAIVE = {
    "grpo": naive_grpo,
    "dr_grpo": naive_dr_grpo,
    "rloo": naive_rloo,
    "maxrl": naive_maxrl,
    "grpo_passk": naive_grpo_passk,
}


@pytest.mark.parametrize("name", BASELINES)
@given(rewards_G=rewards)
def test_advantages_agree_with_naive_formulas(name, rewards_G):
    assert BASELINES[name](rewards_G).tolist() == pytest.approx(NAIVE[name](rewards_G), rel=1e-9, abs=1e-7)


def test_each_name_is_its_own_formula_and_no_other():
    rewards_G = [0.0, 1.0, 1.0, 0.25, 3.0]
    same = {
        (name, other)
        for name, other in product(BASELINES, NAIVE)
        if np.allclose(BASELINES[name](rewards_G), NAIVE[other](rewards_G), rtol=1e-3)
    }
    assert same == {(name, name) for name in BASELINES}


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("rewards_G", [[0.1] * 3, [0.1] * 7, [0.0, 0.0], [1e30] * 3, [1.0], []])
def test_equal_rewards_and_groups_of_one_give_exactly_nothing(baseline, rewards_G):
    advantages = baseline(rewards_G)
    assert advantages.shape == (len(rewards_G),)
    assert not np.any(advantages)


def test_the_better_sibling_is_encouraged():
    assert grpo([1.0, 0.0, 0.0, 0.0]).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
    assert dr_grpo([1.0, 0.0]).tolist() == [0.5, -0.5]
    assert rloo([1.0, 0.0, 0.0]).tolist() == [1.0, -0.5, -0.5]
    assert maxrl([1.0, 0.0, 0.0, 0.0]).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert grpo([1.0, 0.0], std_normalization=False).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("rewards_G", [[1.0, float("nan")], [1.0, float("inf")], [1.0, 1e31]])
def test_rewards_that_no_float_can_square_are_refused(baseline, rewards_G):
    with pytest.raises(ValueError, match="finite, and at most 1e30"):
        baseline(rewards_G)


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize(
    "rewards_G", [[1e30, 0.0], [5e-324, 0.0], [1e30, 1e-30, 0.0], [1.0, 1.0 + 2e-16], [1e-200, 0.0]]
)
def test_huge_tiny_and_nearly_equal_rewards_stay_finite(baseline, rewards_G):
    assert np.all(np.isfinite(baseline(rewards_G)))


def test_pass_at_k_follows_the_gradient_of_the_best_of_a_group():
    """By enumeration: three actions of a softmax policy, groups of three."""
    logits, payoffs = np.array([0.3, -0.2, 0.1]), [0.0, 0.4, 1.0]

    def expected_best(at):
        p = np.exp(at) / np.exp(at).sum()
        groups = product(range(3), repeat=3)
        return sum(np.prod(p[list(g)]) * max(payoffs[a] for a in g) for g in groups)

    p = np.exp(logits) / np.exp(logits).sum()
    gradient = np.zeros(3)
    for g in product(range(3), repeat=3):
        advantages = grpo_passk([payoffs[a] for a in g], std_normalization=False)
        scores = np.eye(3)[list(g)] - p
        gradient += np.prod(p[list(g)]) * (advantages[:, None] * scores).sum(axis=0)
    slopes = [
        (expected_best(logits + step) - expected_best(logits - step)) / 2e-6 for step in np.eye(3) * 1e-6
    ]
    assert gradient == pytest.approx(slopes, abs=1e-8)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="0 or more"):
        maxrl([1.0, -0.5])


@given(rewards)
def test_leaving_one_out_only_rescales_the_mean(rewards_G):
    size = len(rewards_G)
    assert rloo(rewards_G) == pytest.approx(dr_grpo(rewards_G) * size / (size - 1), abs=1e-9)
