from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.returns import discounted_returns, gae
from agentrl.algorithms.tokens import Tokens
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, walk

shares = st.sampled_from([0.0, 0.3, 0.97, 1.0])
discounts = st.sampled_from(["token", "turn"])


def step_of(episode_tokens, n, gamma, discount):
    """How much of what follows token n counts at it."""
    if discount == "turn" and episode_tokens[n].turn == episode_tokens[n + 1].turn:
        return 1.0
    return gamma


def naive_returns(drawn: Batch, rewards, gamma, discount):
    returns, start = [], 0
    for episode_tokens in walk(drawn.samples).values():
        later, backwards = 0.0, []
        for n in reversed(range(len(episode_tokens))):
            decay = step_of(episode_tokens, n, gamma, discount) if n + 1 < len(episode_tokens) else 0.0
            later = rewards[start + n] + decay * later
            backwards.append(later)
        returns += backwards[::-1]
        start += len(episode_tokens)
    return returns


def naive_gae(drawn: Batch, rewards, values, shares, discount):
    gamma, lambd = shares
    advantages, start = [], 0
    for episode_tokens in walk(drawn.samples).values():
        backwards = []
        later = 0.0
        for n in reversed(range(len(episode_tokens))):
            last = n + 1 == len(episode_tokens)
            decay = 0.0 if last else step_of(episode_tokens, n, gamma, discount)
            next_value = 0.0 if last else values[start + n + 1]
            delta = rewards[start + n] + decay * next_value - values[start + n]
            trust = 1.0 if last else step_of(episode_tokens, n, lambd, discount)
            later = delta + decay * trust * later
            backwards.append(later)
        advantages += backwards[::-1]
        start += len(episode_tokens)
    return advantages


def random_pair(tokens):
    rng = np.random.default_rng(len(tokens))
    return rng.normal(size=len(tokens)), rng.normal(size=len(tokens))


@given(batches(), shares, discounts)
def test_returns_agree_with_a_loop(drawn, gamma, discount):
    tokens = Tokens.of(drawn.samples)
    rewards_N, _ = random_pair(tokens)
    returns_N = discounted_returns(rewards_N, tokens, gamma=gamma, discount=discount)
    assert returns_N == pytest.approx(np.array(naive_returns(drawn, rewards_N, gamma, discount)), abs=1e-10)


@given(batches(), shares, shares, discounts)
def test_generalised_advantages_agree_with_a_loop(drawn, gamma, lambd, discount):
    tokens = Tokens.of(drawn.samples)
    rewards_N, values_N = random_pair(tokens)
    advantages_N, returns_N = gae(rewards_N, values_N, tokens, gamma=gamma, lambd=lambd, discount=discount)
    expected = np.array(naive_gae(drawn, rewards_N, values_N, (gamma, lambd), discount))
    assert advantages_N == pytest.approx(expected, abs=1e-10)
    assert returns_N == pytest.approx(expected + values_N, abs=1e-10)


@pytest.mark.parametrize("discount", ["token", "turn"])
def test_long_episodes_agree_with_a_loop(discount):
    drawn = batch(
        [EpisodeSpec([700, 1, 900]), EpisodeSpec([4096], split=0)], [EpisodeSpec([1000, 333], split=1)]
    )
    tokens = Tokens.of(drawn.samples)
    rewards_N, values_N = random_pair(tokens)
    advantages_N, _ = gae(rewards_N, values_N, tokens, gamma=0.999, lambd=0.95, discount=discount)
    expected = naive_gae(drawn, rewards_N, values_N, (0.999, 0.95), discount)
    assert advantages_N == pytest.approx(np.array(expected), abs=1e-10)


def test_each_way_to_discount_is_its_own_and_no_other():
    drawn = batch([EpisodeSpec([2, 3, 1])])
    tokens = Tokens.of(drawn.samples)
    rewards_N, _ = random_pair(tokens)
    kinds = list(product([0.5, 1.0], ["token", "turn"]))
    same = {
        (kind, other)
        for kind, other in product(kinds, kinds)
        if np.allclose(
            discounted_returns(rewards_N, tokens, gamma=kind[0], discount=kind[1]),
            naive_returns(drawn, rewards_N, *other),
        )
    }
    alike = {((1.0, a), (1.0, b)) for a in ("token", "turn") for b in ("token", "turn")}
    assert same == {(kind, kind) for kind in kinds} | alike


def test_gamma_and_lambda_of_one_give_the_return_minus_the_value():
    drawn = batch([EpisodeSpec([2, 2])])
    tokens = Tokens.of(drawn.samples)
    advantages_N, returns_N = gae(np.array([0.0, 0, 0, 1]), np.array([0.5, 0.25, 0, 2]), tokens)
    assert advantages_N.tolist() == [0.5, 0.75, 1.0, -1.0]
    assert returns_N.tolist() == [1, 1, 1, 1]


def test_a_rewritten_history_changes_no_return():
    unsplit, split = batch([EpisodeSpec([2, 3, 1])]), batch([EpisodeSpec([2, 3, 1], split=1)])
    rewards_N, values_N = random_pair(Tokens.of(unsplit.samples))
    assert len(split.samples) == 2
    results = [gae(rewards_N, values_N, Tokens.of(b.samples), gamma=0.9, lambd=0.9) for b in (unsplit, split)]
    assert results[0][0].tolist() == results[1][0].tolist()


@given(batches())
def test_huge_rewards_and_values_give_finite_returns(drawn):
    tokens = Tokens.of(drawn.samples)
    huge_N = np.full(len(tokens), 1e38)
    assert np.all(np.isfinite(discounted_returns(huge_N, tokens)))
    assert np.all(np.isfinite(gae(huge_N, -huge_N, tokens)[0]))


@pytest.mark.parametrize(
    ("gamma", "lambd", "name"), [(1.01, 1, "gamma"), (-0.1, 1, "gamma"), (1, 2, "lambd")]
)
def test_shares_beyond_one_are_refused(gamma, lambd, name):
    tokens = Tokens.of(batch([EpisodeSpec([2])]).samples)
    with pytest.raises(ValueError, match=f"{name} must be between 0 and 1"):
        gae(np.zeros(2), np.zeros(2), tokens, gamma=gamma, lambd=lambd)
