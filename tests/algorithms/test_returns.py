from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.returns import discounted_returns, gae
from agentrl.algorithms.tokens import Tokens
from tests.algorithms.batches import Batch, Told, batch, batches, walk

shares = st.sampled_from([0.0, 0.3, 0.97, 1.0])
discounts = st.sampled_from(["token", "turn"])


def step_of(told, n, gamma, discount):
    """How much of what follows token n counts at it."""
    if discount == "turn" and told[n].turn == told[n + 1].turn:
        return 1.0
    return gamma


def returns_by_hand(one: Batch, rewards, gamma, discount):
    returns, start = [], 0
    for told in walk(one.samples).values():
        later, backwards = 0.0, []
        for n in reversed(range(len(told))):
            decay = step_of(told, n, gamma, discount) if n + 1 < len(told) else 0.0
            later = rewards[start + n] + decay * later
            backwards.append(later)
        returns += backwards[::-1]
        start += len(told)
    return returns


def gae_by_hand(one: Batch, rewards, values, shares, discount):
    gamma, lambd = shares
    advantages, start = [], 0
    for told in walk(one.samples).values():
        backwards = []
        later = 0.0
        for n in reversed(range(len(told))):
            last = n + 1 == len(told)
            decay = 0.0 if last else step_of(told, n, gamma, discount)
            next_value = 0.0 if last else values[start + n + 1]
            delta = rewards[start + n] + decay * next_value - values[start + n]
            trust = 1.0 if last else step_of(told, n, lambd, discount)
            later = delta + decay * trust * later
            backwards.append(later)
        advantages += backwards[::-1]
        start += len(told)
    return advantages


def random_pair(tokens):
    rng = np.random.default_rng(len(tokens))
    return rng.normal(size=len(tokens)), rng.normal(size=len(tokens))


@given(batches(), shares, discounts)
def test_returns_agree_with_a_loop(one, gamma, discount):
    tokens = Tokens.of(one.samples)
    rewards_N, _ = random_pair(tokens)
    returns_N = discounted_returns(rewards_N, tokens, gamma=gamma, discount=discount)
    assert returns_N == pytest.approx(np.array(returns_by_hand(one, rewards_N, gamma, discount)), abs=1e-10)


@given(batches(), shares, shares, discounts)
def test_generalised_advantages_agree_with_a_loop(one, gamma, lambd, discount):
    tokens = Tokens.of(one.samples)
    rewards_N, values_N = random_pair(tokens)
    advantages_N, returns_N = gae(rewards_N, values_N, tokens, gamma=gamma, lambd=lambd, discount=discount)
    expected = np.array(gae_by_hand(one, rewards_N, values_N, (gamma, lambd), discount))
    assert advantages_N == pytest.approx(expected, abs=1e-10)
    assert returns_N == pytest.approx(expected + values_N, abs=1e-10)


@pytest.mark.parametrize("discount", ["token", "turn"])
def test_long_episodes_agree_with_a_loop(discount):
    one = batch([Told([700, 1, 900]), Told([4096], split=0)], [Told([1000, 333], split=1)])
    tokens = Tokens.of(one.samples)
    rewards_N, values_N = random_pair(tokens)
    advantages_N, _ = gae(rewards_N, values_N, tokens, gamma=0.999, lambd=0.95, discount=discount)
    expected = gae_by_hand(one, rewards_N, values_N, (0.999, 0.95), discount)
    assert advantages_N == pytest.approx(np.array(expected), abs=1e-10)


def test_each_way_to_discount_is_its_own_and_no_other():
    one = batch([Told([2, 3, 1])])
    tokens = Tokens.of(one.samples)
    rewards_N, _ = random_pair(tokens)
    kinds = list(product([0.5, 1.0], ["token", "turn"]))
    same = {
        (one_kind, other)
        for one_kind, other in product(kinds, kinds)
        if np.allclose(
            discounted_returns(rewards_N, tokens, gamma=one_kind[0], discount=one_kind[1]),
            returns_by_hand(one, rewards_N, *other),
        )
    }
    alike = {((1.0, a), (1.0, b)) for a in ("token", "turn") for b in ("token", "turn")}
    assert same == {(kind, kind) for kind in kinds} | alike


def test_gamma_and_lambda_of_one_leave_what_is_to_come_minus_the_value():
    one = batch([Told([2, 2])])
    tokens = Tokens.of(one.samples)
    advantages_N, returns_N = gae(np.array([0.0, 0, 0, 1]), np.array([0.5, 0.25, 0, 2]), tokens)
    assert advantages_N.tolist() == [0.5, 0.75, 1.0, -1.0]
    assert returns_N.tolist() == [1, 1, 1, 1]


def test_a_rewritten_history_changes_no_return():
    whole, split = batch([Told([2, 3, 1])]), batch([Told([2, 3, 1], split=1)])
    rewards_N, values_N = random_pair(Tokens.of(whole.samples))
    assert len(split.samples) == 2
    given_each = [
        gae(rewards_N, values_N, Tokens.of(b.samples), gamma=0.9, lambd=0.9) for b in (whole, split)
    ]
    assert given_each[0][0].tolist() == given_each[1][0].tolist()


@given(batches())
def test_huge_rewards_and_values_give_finite_returns(one):
    tokens = Tokens.of(one.samples)
    huge_N = np.full(len(tokens), 1e38)
    assert np.all(np.isfinite(discounted_returns(huge_N, tokens)))
    assert np.all(np.isfinite(gae(huge_N, -huge_N, tokens)[0]))


@pytest.mark.parametrize(
    ("gamma", "lambd", "name"), [(1.01, 1, "gamma"), (-0.1, 1, "gamma"), (1, 2, "lambd")]
)
def test_shares_beyond_one_are_refused(gamma, lambd, name):
    tokens = Tokens.of(batch([Told([2])]).samples)
    with pytest.raises(ValueError, match=f"{name} must be between 0 and 1"):
        gae(np.zeros(2), np.zeros(2), tokens, gamma=gamma, lambd=lambd)
