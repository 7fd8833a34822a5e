import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.rewards import KlPenalty, kl_estimate, token_rewards
from agentrl.algorithms.tokens import Tokens
from agentrl.types import Scores
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, flat, walk

KINDS = ("k1", "k2", "k3", "low_var_kl")
gaps = st.lists(st.floats(-15, 15), max_size=6)


def naive_rewards(drawn: Batch):
    verdicts = {v.rollout_id: v for group in drawn.groups for v in group.verdicts}
    rewards = []
    for id, tokens in walk(drawn.samples).items():
        own = [0.0] * len(tokens)
        rest = verdicts[id].total
        for turn, reward in enumerate(verdicts[id].turn_rewards):
            if reward is None or not tokens:
                continue
            rest -= reward
            before = [n for n, token in enumerate(tokens) if token.turn <= turn]
            own[before[-1] if before else 0] += reward
        if tokens:
            own[-1] += rest
        rewards += own
    return rewards


def naive_kl(d, kind):
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": min(max(k3, -10.0), 10.0)}[kind]


@given(batches())
def test_rewards_stand_where_a_loop_puts_them_and_sum_to_the_total(drawn):
    tokens = Tokens.of(drawn.samples)
    rewards_N = token_rewards(drawn.groups, tokens)
    assert rewards_N == pytest.approx(np.array(naive_rewards(drawn)), abs=1e-9)
    totals = {v.rollout_id: v.total for group in drawn.groups for v in group.verdicts}
    for e, id in enumerate(tokens.rollout_ids):
        own = rewards_N[tokens.rollout_index_N == e]
        assert own.sum() == pytest.approx(totals[id] if len(own) else 0.0, abs=1e-9)


def test_a_turn_is_paid_at_its_last_token_and_the_rest_at_the_end_of_the_last_sample():
    drawn = batch([EpisodeSpec([2, 1, 2], total=2.0, turn_rewards=[0.5, None, 0.25], split=1)])
    drawn.samples.reverse()
    assert token_rewards(drawn.groups, Tokens.of(drawn.samples)).tolist() == [0, 0.5, 0, 0, 0.25 + 1.25]


def test_a_turn_without_tokens_pays_the_nearest_before_it_else_the_first_after():
    drawn = batch([EpisodeSpec([0, 2, 0, 2], total=7.0, turn_rewards=[1.0, 2.0, 4.0])])
    assert token_rewards(drawn.groups, Tokens.of(drawn.samples)).tolist() == [1, 6, 0, 0]


def test_rewards_of_turns_that_were_never_played_are_paid_at_the_end():
    drawn = batch([EpisodeSpec([1, 1], total=3.0, turn_rewards=[None, None, 1.0, 1.0])])
    assert token_rewards(drawn.groups, Tokens.of(drawn.samples)).tolist() == [0, 3]


def test_an_episode_without_trainable_tokens_is_paid_nothing():
    drawn = batch([EpisodeSpec([0, 0], total=3.0, turn_rewards=[1.0]), EpisodeSpec([1], total=1.0)])
    assert token_rewards(drawn.groups, Tokens.of(drawn.samples)).tolist() == [1.0]


def test_a_turn_reward_that_is_no_number_is_refused():
    drawn = batch([EpisodeSpec([1], turn_rewards=[math.nan])])
    with pytest.raises(ValueError, match=r"g0\.0: rewards of turns must be finite"):
        token_rewards(drawn.groups, Tokens.of(drawn.samples))


@pytest.mark.parametrize("kind", KINDS)
@given(gaps_N=gaps)
def test_estimates_of_kl_agree_with_pencil_and_paper(kind, gaps_N):
    estimates = kl_estimate(np.array(gaps_N) - 2, np.full(len(gaps_N), -2.0), kind)
    assert estimates.tolist() == pytest.approx([naive_kl(d, kind) for d in gaps_N], rel=1e-6, abs=1e-9)


def test_each_estimate_of_kl_is_its_own_and_no_other():
    gaps_N = [0.5, -0.5, 2.0, -4.0]
    same = {
        (kind, other)
        for kind, other in product(KINDS, KINDS)
        if np.allclose(
            kl_estimate(np.array(gaps_N), np.zeros(4), kind), [naive_kl(d, other) for d in gaps_N], rtol=1e-3
        )
    }
    assert same == {(kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_of_kl_stay_finite_and_keep_their_sign(kind):
    estimates = kl_estimate(np.array([1e4, -1e4, 0.0]), np.zeros(3), kind)
    assert np.all(np.isfinite(estimates))
    assert kind == "k1" or np.all(estimates >= 0)


def test_k1_and_k3_are_unbiased():
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    kl = float(np.sum(policy * np.log(policy / reference)))
    for kind in ("k1", "k3"):
        estimates = kl_estimate(np.log(policy), np.log(reference), kind)
        assert float(np.sum(policy * estimates)) == pytest.approx(kl)


def test_the_penalty_compares_the_old_policy_with_the_reference():
    drawn = batch([EpisodeSpec([2, 1])])
    estimates = KlPenalty(0.1).estimate(drawn.token_scores)
    expected = [
        old - ref
        for old, ref in zip(flat(drawn, drawn.scores.proximal), flat(drawn, drawn.scores.ref), strict=True)
    ]
    assert estimates.tolist() == pytest.approx(expected)


def test_a_penalty_without_a_reference_says_what_to_do():
    drawn = batch([EpisodeSpec([1])])
    with pytest.raises(ValueError, match="load one"):
        KlPenalty(0.1).estimate(drawn.tokens.scores(Scores(drawn.scores.proximal)))
