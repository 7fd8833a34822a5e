import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import Grpo, group_advantages
from agentrl.algorithms.samples import samples_of
from agentrl.types import Restart, Trajectory
from tests.algorithms.episodes import group, of_engine, sample, turn

rewards = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), min_size=2, max_size=9)


@given(rewards, st.booleans())
def test_advantages_agree_with_pencil_and_paper(rewards_G, std_normalization):
    mean = statistics.fmean(rewards_G)
    spread = statistics.stdev(rewards_G) + 1e-6 if std_normalization else 1.0
    expected = [(reward - mean) / spread for reward in rewards_G]
    advantages = group_advantages(rewards_G, std_normalization=std_normalization)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-7)


def test_the_better_sibling_is_encouraged():
    assert group_advantages([1.0, 0.0, 0.0, 0.0], std_normalization=True).tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-5
    )
    assert group_advantages([1.0, 0.0], std_normalization=False).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("std_normalization", [True, False])
def test_equal_rewards_give_exactly_nothing(std_normalization):
    assert not np.any(group_advantages([0.1] * 3, std_normalization=std_normalization))


@pytest.mark.parametrize("rewards_G", [[1.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_group_that_cannot_be_compared_is_refused(rewards_G):
    with pytest.raises(ValueError, match=r"at least 2|finite"):
        group_advantages(rewards_G, std_normalization=True)


def test_an_outcome_is_credited_to_every_loss_token_and_to_nothing_else():
    groups = [group("a", [1, 0], turn([1, 2], [3, 4]), turn([5], [6])), group("b", [0, 0, 3])]
    samples = [s for g in groups for e in g.episodes for s in samples_of(e, temperature=1.0)]
    credit = Grpo(std_normalization=False)(groups, samples, of_engine(samples))
    assert [a.tolist() for a in credit.advantages] == [
        [0, 0, 0.5, 0.5, 0, 0.5],
        [0, 0, -0.5, -0.5, 0, -0.5],
        [0, 0, -1],
        [0, 0, -1],
        [0, 0, 2],
    ]
    assert {a.dtype for a in credit.advantages} == {np.dtype(np.float32)}
    assert [w.tolist() for w in credit.weights[:1]] == [pytest.approx([0, 0, 1 / 9, 1 / 9, 0, 1 / 9])]
    assert sum(float(w.sum()) for w in credit.weights) == pytest.approx(1.0)


def test_standard_deviation_divides_only_where_it_is_asked_for():
    groups = [group("a", [2, 0])]
    samples = [sample("a.0", [0, 1]), sample("a.1", [0, 1])]
    divided = Grpo()(groups, samples, of_engine(samples)).advantages
    plain = Grpo(std_normalization=False)(groups, samples, of_engine(samples)).advantages
    assert [a[1] for a in divided] == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)
    assert [a[1] for a in plain] == [1, -1]


def test_baselines_count_episodes_whatever_became_of_them():
    # Episode 0 became two samples, episode 2 none: the mean of 3, 0, 0 is still 1.
    groups = [group("a", [3, 0, 0])]
    samples = [sample("a.0", [0, 1]), sample("a.0", [0, 1, 1]), sample("a.1", [0, 1])]
    credit = Grpo(std_normalization=False)(groups, samples, of_engine(samples))
    assert [a.tolist() for a in credit.advantages] == [[0, 2], [0, 2, 2], [0, -1]]
    assert [w.tolist() for w in credit.weights] == [[0, 0.25], [0, 0.25, 0.25], [0, 0.25]]


def test_a_sample_from_nowhere_is_refused():
    with pytest.raises(ValueError, match=r"no group: \['x'\]"):
        Grpo()([group("a", [1, 0])], [stranger := sample("x", [0, 1])], of_engine([stranger]))


def test_an_episode_that_began_anew_weighs_what_it_weighed_in_one_piece():
    turns = (turn([1, 2], [3, 4]), turn([5], [6]))
    whole = group("a", [1, 0], *turns)
    split = replace(
        whole,
        episodes=tuple(
            replace(e, trajectories=(Trajectory(turns[:1]), Trajectory(turns[1:], 0, Restart.COMPACTED)))
            for e in whole.episodes
        ),
    )
    per_token = []
    for one in (whole, split):
        samples = [s for e in one.episodes for s in samples_of(e, temperature=1.0)]
        credit = Grpo()([one], samples, of_engine(samples))
        masks = [s.loss_mask for s in samples]
        per_token.append(
            [
                (float(a), float(w))
                for advantages, weights, mask in zip(credit.advantages, credit.weights, masks, strict=True)
                for a, w in zip(advantages[mask], weights[mask], strict=True)
            ]
        )
    assert per_token[0] == per_token[1]
    assert len(per_token[0]) == 6
