from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.turns import returns_to_go, turn_advantages
from tests.algorithms.batches import EpisodeSpec, batch, episode_specs

siblings = st.lists(episode_specs(), min_size=2, max_size=5)
THETA = 0.4
CONTINUE = 1 / (1 + exp(-THETA))


def naive_returns(spec: EpisodeSpec, gamma):
    rewards = [0.0] * len(spec.lengths)
    for k, reward in enumerate(spec.turn_rewards):
        if reward is not None:
            rewards[k] += reward
    rewards[-1] += spec.total - sum(r for r in spec.turn_rewards if r is not None)
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def naive_advantages(returns):
    advantages = []
    for i, mine in enumerate(returns):
        others = [r for j, r in enumerate(returns) if j != i]
        row = []
        for k, value in enumerate(mine):
            reached = [r[k] for r in others if len(r) > k] or [r[0] for r in others]
            row.append(value - sum(reached) / len(reached))
        advantages.append(row)
    return advantages


@given(siblings, st.sampled_from([0.0, 0.5, 1.0]))
def test_turns_agree_with_naive_formulas(group, gamma):
    returns = returns_to_go(batch(group).groups[0].siblings("agent"), gamma=gamma)
    naive = [naive_returns(spec, gamma) for spec in group]
    assert [r.tolist() for r in returns] == [pytest.approx(r, abs=1e-9) for r in naive]
    expected = [pytest.approx(a, abs=1e-9) for a in naive_advantages(naive)]
    assert [a.tolist() for a in turn_advantages(returns)] == expected


def test_a_turn_that_no_sibling_reached_is_compared_with_whole_episodes():
    returns = [np.array([1.0, 5.0]), np.array([2.0]), np.array([6.0])]
    assert [a.tolist() for a in turn_advantages(returns)] == [[-3.0, 1.0], [-1.5], [4.5]]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_siblings_that_did_alike_get_exactly_nothing(size):
    returns = [np.full(k % 3 + 1, 0.1) for k in range(size)]
    assert not any(np.any(a) for a in turn_advantages(returns))


def test_a_group_of_one_gets_zero():
    assert [a.tolist() for a in turn_advantages([np.array([1.0, 2.0])])] == [[0.0, 0.0]]


def test_an_episode_without_turns_still_counts_in_the_baseline():
    (group,) = batch([EpisodeSpec([1, 1], total=3.0), EpisodeSpec([1], total=1.0)]).groups
    played, unplayed = group.episodes
    group = replace(group, episodes=(played, replace(unplayed, trajectories=())))
    assert [a.tolist() for a in turn_advantages(returns_to_go(group.siblings("agent")))] == [
        [2.0, 2.0],
        [-2.0],
    ]


# A world of one question, asked up to three times: go on, or stop? Going on costs 0.25 now. Stopping pays 1
# at once, nothing at the second turn and 3 at the third, where going on ends the episode for nothing.
class Path:
    def __init__(self, actions, pay):
        self.probability = float(np.prod([CONTINUE if a else 1 - CONTINUE for a in actions]))
        # d log p / d theta of each action, theta being the logit of going on.
        self.scores = np.array([1 - CONTINUE if a else -CONTINUE for a in actions])
        rewards = [-0.25 if a else pay for a in actions]
        self.returns = np.cumsum(rewards[::-1])[::-1].copy()


PATHS = [Path([0], 1.0), Path([1, 0], 0.0), Path([1, 1, 0], 3.0), Path([1, 1, 1], 0.0)]
GROUPS = list(product(PATHS, repeat=3))
PROBABILITIES = np.array([np.prod([path.probability for path in paths]) for paths in GROUPS])


def exact_gradient():
    return sum(path.probability * path.scores.sum() * path.returns[0] for path in PATHS)


def with_itself(returns):
    """Each turn against the mean of all who reached it, this episode among them."""
    advantages = []
    for mine in returns:
        means = [np.mean([r[k] for r in returns if len(r) > k]) for k in range(len(mine))]
        advantages.append(mine - np.array(means))
    return advantages


def pooled(returns):
    """Each turn against the mean over all turns of the group."""
    return [mine - np.mean(np.concatenate(returns)) for mine in returns]


@cache
def estimates(method):
    """The gradient that each possible group gives: the mean over its episodes of score x advantage."""
    estimates_by_group = []
    for paths in GROUPS:
        advantages = method([path.returns for path in paths])
        estimates_by_group.append(np.mean([p.scores @ a for p, a in zip(paths, advantages, strict=True)]))
    return np.array(estimates_by_group)


def test_the_expected_gradient_is_the_exact_one_over_all_groups_there_are():
    assert PROBABILITIES.sum() == pytest.approx(1.0)
    assert float(PROBABILITIES @ estimates(turn_advantages)) == pytest.approx(exact_gradient(), abs=1e-12)
    # The derivative itself, by finite differences of the expected return.
    assert exact_gradient() == pytest.approx(slope_of_the_expected_return(), abs=1e-6)


def slope_of_the_expected_return():
    def expected(theta):
        go = 1 / (1 + exp(-theta))
        stop = 1 - go
        return stop * 1 + go * stop * -0.25 + go * go * stop * 2.5 + go**3 * -0.75

    return (expected(THETA + 1e-4) - expected(THETA - 1e-4)) / 2e-4


@pytest.mark.parametrize("method", [with_itself, pooled])
def test_other_baselines_have_another_expectation(method):
    assert abs(float(PROBABILITIES @ estimates(method)) - exact_gradient()) > 0.02


def test_a_monte_carlo_run_finds_the_exact_gradient_and_shows_the_others_to_be_biased():
    number = 200_000
    drawn = np.random.default_rng(0).multinomial(number, PROBABILITIES / PROBABILITIES.sum())

    def interval(method):
        mean = float(drawn @ estimates(method)) / number
        variance = float(drawn @ (estimates(method) - mean) ** 2) / number
        return mean - 1.96 * (variance / number) ** 0.5, mean + 1.96 * (variance / number) ** 0.5

    low, high = interval(turn_advantages)
    assert low <= exact_gradient() <= high
    for biased in (with_itself, pooled):
        low, high = interval(biased)
        assert not low <= exact_gradient() <= high


def test_the_problem_lets_the_policy_decide_how_many_turns_there_are():
    assert {len(path.returns) for path in PATHS} == {1, 2, 3}
    assert log(CONTINUE / (1 - CONTINUE)) == pytest.approx(THETA)
