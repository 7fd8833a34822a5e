"""What an algorithm adapts: formulas in loops, and numbers that survive a checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.controls import AdaptiveEntropy, AdaptiveKl, Controls, RoleBaselines
from agentrl.algorithms.estimators import RoleConditioned
from agentrl.algorithms.rewards import KlPenalty
from agentrl.algorithms.tokens import Tokens
from agentrl.types import Group, RolloutId, Scores, Verdict
from tests.algorithms.batches import EpisodeSpec, batch, batches
from tests.algorithms.episodes import TASK, group, sample, turn

KLS = st.lists(st.floats(0, 5), min_size=1, max_size=20)


@given(kls=KLS, number=st.integers(1, 500))
def test_the_penalty_follows_the_divergence(kls, number):
    adaptive, expected = AdaptiveKl(0.1, 0.5, 1000.0), 0.1
    for kl in kls:
        adaptive.observe(kl, number)
        error = min(max((kl - 0.5) / 0.5, -0.2), 0.2)
        expected *= 1 + error * number / 1000
        assert adaptive.coef == pytest.approx(expected)
    adaptive.observe(0.5, number)
    assert adaptive.coef == pytest.approx(expected), "at the target it stays"


@given(entropies=st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_the_bonus_grows_while_the_entropy_is_low(entropies):
    adaptive, expected = AdaptiveEntropy(0.01, 0.5, 0.004), 0.01
    for entropy in entropies:
        adaptive.observe(entropy)
        expected = expected + 0.004 if entropy < 0.5 else max(expected - 0.004, 0.0)
        assert adaptive.coef == pytest.approx(expected)
        assert adaptive.active == (adaptive.coef if entropy < 0.5 else 0.0)


def test_a_baseline_is_a_moving_average_that_no_order_changes():
    rewards = [1.0, 0.0, 0.5, 0.25]
    baselines = RoleBaselines(0.9, {"agent": 2.0})
    baselines.observe([group("g", rewards)])
    assert baselines.means["agent"] == pytest.approx(0.9**4 * 2.0 + (1 - 0.9**4) * fmean(rewards))
    again = RoleBaselines(0.9, {"agent": 2.0})
    again.observe([group("g", rewards[::-1])])
    assert again.means == pytest.approx(baselines.means)
    # Of equal rewards, one by one is the same.
    one_by_one, at_once = 2.0, RoleBaselines(0.9, {"agent": 2.0})
    for _ in range(4):
        one_by_one = 0.9 * one_by_one + 0.1 * 0.5
    at_once.observe([group("g", [0.5] * 4)])
    assert at_once.means["agent"] == pytest.approx(one_by_one)


def test_each_role_is_compared_with_its_own_baseline():
    samples = [
        replace(sample("g.0", [0, 1, 1]), rollout_id=RolloutId("g.0", "critic")),
        replace(sample("g.0", [0, 1]), rollout_id=RolloutId("g.0", "solver")),
        replace(sample("g.1", [0, 1]), rollout_id=RolloutId("g.1", "solver")),
    ]
    verdicts = (
        Verdict("g.0", "s", 1.0, agent="critic"),
        Verdict("g.0", "s", 0.0, agent="solver"),
        Verdict("g.1", "s", 0.5, agent="solver"),
    )
    episodes = tuple(
        replace(e, agents=agents, trajectories=())
        for e, agents in zip(
            group("g", [0.0, 0.0]).episodes, (("critic", "solver"), ("solver",)), strict=True
        )
    )
    played = Group("g", TASK, 0, episodes, verdicts)
    tokens = Tokens.of(samples)
    scores = tokens.scores(Scores(tuple(s.logprobs for s in samples)))
    estimator = RoleConditioned(RoleBaselines(means={"critic": 0.75, "solver": -0.5}))
    assert estimator([played], tokens, scores).advantages_N.tolist() == [0.25, 0.25, 0.5, 1.0]
    fresh = RoleConditioned(RoleBaselines())
    assert fresh([played], tokens, scores).advantages_N.tolist() == [1.0, 1.0, 0.0, 0.5]


@given(drawn=batches())
def test_a_penalty_follows_its_control(drawn):
    adaptive = AdaptiveKl(0.3, 0.5)
    by_control = drawn.credit(RoleConditioned(RoleBaselines(), KlPenalty(0.1, adaptive))).advantages
    fixed = drawn.credit(RoleConditioned(RoleBaselines(), KlPenalty(0.3))).advantages
    assert [a.tolist() for a in by_control] == [a.tolist() for a in fixed]
    adaptive.coef = 0.6
    twice = drawn.credit(RoleConditioned(RoleBaselines(), KlPenalty(0.1, adaptive))).advantages
    fixed = drawn.credit(RoleConditioned(RoleBaselines(), KlPenalty(0.6))).advantages
    assert [a.tolist() for a in twice] == [a.tolist() for a in fixed]


def everything() -> Controls:
    return Controls(AdaptiveKl(0.1, 0.5, 50.0), AdaptiveEntropy(0.01, 0.5), RoleBaselines(), "ref_kl")


def test_numbers_of_a_checkpoint_go_on_as_if_nothing_had_been_between():
    rng = random.Random(3)
    seen = [
        (
            [group("g", [rng.random() for _ in range(4)])],
            {"train/entropy_loss": rng.random(), "train/ref_kl": rng.random(), "train/kl_loss": 9.0},
        )
        for _ in range(8)
    ]
    straight, first = everything(), everything()
    for number, (groups, metrics) in enumerate(seen):
        straight.observe(groups, metrics)
        if number < 4:
            first.observe(groups, metrics)
    second = everything()
    second.restore(first.state())
    assert second.state() == first.state()
    for groups, metrics in seen[4:]:
        second.observe(groups, metrics)
    assert second.state() == straight.state()
    assert second.coefficients == straight.coefficients
    assert second.metrics == straight.metrics
    assert {"kl_coef", "entropy_coef", "baseline/agent"} == set(second.metrics)


def test_only_rollouts_that_are_trained_on_move_the_penalty():
    """Not those of a frozen opponent in each episode, nor the greedy sibling of each group."""

    def against_an_opponent(played):
        agents = ("agent", "opponent")
        return replace(played, agents=agents, frozen_agents=("opponent",))

    def group_of(id):
        turns = [turn([1], [2], temperature=temperature) for temperature in (1.0, 1.0, 0.0)]
        own = [replace(group(id, [1.0], t).episodes[0], id=f"{id}.{i}") for i, t in enumerate(turns)]
        episodes = tuple(map(against_an_opponent, own))
        verdicts = [Verdict(e.id, "s", 1.0, agent=agent) for e in episodes for agent in e.agents]
        return Group(id, TASK, 0, episodes, tuple(verdicts))

    controls = Controls(AdaptiveKl(0.1, 0.5, horizon=50.0))
    controls.observe([group_of("a"), group_of("b"), group_of("c")], {"train/kl_loss": 5.0})
    # Three groups with two sampled rollouts each: https://arxiv.org/abs/1909.08593, equation 9.
    assert controls.kl.coef == pytest.approx(0.1 * (1 + 0.2 * 6 / 50))


def test_an_iteration_without_an_update_changes_no_coefficient():
    controls = everything()
    before = controls.coefficients
    controls.observe([group("g", [1.0, 0.0])], {})
    assert controls.coefficients == before
    assert controls.baselines.means["agent"] > 0


def test_what_is_not_adapted_is_the_losss_own():
    controls = Controls()
    controls.observe([group("g", [1.0])], {"train/entropy_loss": 0.1})
    assert controls.coefficients == (None, None)
    assert (controls.metrics, controls.state()) == ({}, {})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdaptiveKl(0.0, 0.1), "above 0"),
        (lambda: AdaptiveKl(0.1, 0.0), "above 0"),
        (lambda: AdaptiveEntropy(-0.1, 0.1), "0 or more"),
        (lambda: AdaptiveEntropy(0.0, 0.1, 0.0), "0 or more"),
        (lambda: RoleBaselines(1.0), "below 1"),
    ],
)
def test_controls_that_make_no_sense_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_rewards_of_other_batches_count_in_the_next_advantages():
    drawn = batch([EpisodeSpec([2], 1.0)], [EpisodeSpec([1], 0.0)])
    baselines = RoleBaselines(0.5)
    baselines.observe(drawn.groups)
    assert baselines.means["agent"] == pytest.approx(0.75 * 0.5)
    arrays = drawn.credit(RoleConditioned(baselines)).advantages
    assert np.concatenate(arrays)[np.concatenate(arrays) != 0].tolist() == pytest.approx(
        [0.625, 0.625, -0.375]
    )
