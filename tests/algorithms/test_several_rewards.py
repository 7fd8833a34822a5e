"""Estimators of several rewards, and shaped rewards, against loops over rollouts."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.group_relative import GroupRelative, RewardDecoupled
from agentrl.algorithms.rewards import KlPenalty
from agentrl.algorithms.shaping import Shaped, Shaping
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, close, walk

NAMES = ("env", "env/found", "brevity")


def with_parts(drawn: Batch, seed: int) -> Batch:
    """The batch, whose verdicts have parts; some lack one of them."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in drawn.groups:
        verdicts = tuple(
            replace(
                v, parts={n: float(rng.integers(0, 3)) / 2 for n in NAMES if n == "env" or rng.random() < 0.8}
            )
            for v in group.verdicts
        )
        groups.append(replace(group, verdicts=verdicts))
    return drawn._replace(groups=groups)


def standardised(values: list[float]) -> list[float]:
    if len(set(values)) < 2:
        return [0.0] * len(values)
    return [(v - fmean(values)) / (stdev(values) + 1e-6) for v in values]


def naive(drawn: Batch, weights: dict[str, float]) -> dict[str, float]:
    """The advantage of each episode."""
    ids, sums = [], []
    for group in drawn.groups:
        columns = {name: standardised([v.parts.get(name, 0.0) for v in group.verdicts]) for name in weights}
        for i, verdict in enumerate(group.verdicts):
            ids.append(verdict.episode_id)
            sums.append(sum(weights[name] * column[i] for name, column in columns.items()))
    return dict(zip(ids, standardised(sums), strict=True))


def by_episode(drawn: Batch, estimator) -> dict[str, float]:
    arrays = drawn.credit(estimator).advantages
    return {
        id[0]: float(arrays[tokens[0].sample][tokens[0].position])
        for id, tokens in walk(drawn.samples).items()
        if tokens
    }


@given(drawn=batches(), seed=st.integers(0, 99))
def test_each_reward_is_normalised_by_itself_and_their_sum_over_the_batch(drawn, seed):
    drawn = with_parts(drawn, seed)
    present = {name for group in drawn.groups for verdict in group.verdicts for name in verdict.parts}
    for weights in (None, {"env": 1.0, "env/found": 0.5}, {"brevity": 2.0, "env": 0.3}):
        used = weights or {name: 1.0 for name in present if "/" not in name}
        expected = naive(drawn, used)
        for id, advantage in by_episode(drawn, RewardDecoupled(weights)).items():
            assert advantage == pytest.approx(expected[id], rel=1e-4, abs=1e-4)


def test_rewards_that_cancel_in_a_sum_do_not_cancel_here():
    drawn = batch([EpisodeSpec([1], 1.0), EpisodeSpec([1], 1.0), EpisodeSpec([1], 1.0)])
    parts = [{"env": 1.0, "brevity": 0.0}, {"env": 0.0, "brevity": 1.0}, {"env": 0.5, "brevity": 0.5}]
    verdicts = tuple(replace(v, parts=own) for v, own in zip(drawn.groups[0].verdicts, parts, strict=True))
    drawn = drawn._replace(groups=[replace(drawn.groups[0], verdicts=verdicts)])
    assert set(by_episode(drawn, GroupRelative()).values()) == {0.0}
    advantages = by_episode(drawn, RewardDecoupled({"env": 1.0, "brevity": 0.1}))
    assert list(advantages.values()) == pytest.approx([1.0, -1.0, 0.0], abs=1e-5)


def test_weights_of_rewards_that_are_nowhere_are_refused():
    drawn = with_parts(batch([EpisodeSpec([1], 1.0), EpisodeSpec([2], 0.0)]), 1)
    with pytest.raises(ValueError, match=r"names in gdpo_weights \(brevty\); name some of brevity, env"):
        drawn.credit(RewardDecoupled({"brevty": 1.0}))


@pytest.mark.parametrize("estimator", [RewardDecoupled(), RewardDecoupled(kl=KlPenalty(0.25))])
def test_the_contract_holds_without_parts(estimator):
    check_estimator(estimator)


SHAPINGS = {
    "scale": Shaping(2.0),
    "bounds": Shaping(low=0.2, high=0.6),
    "turns": Shaping(turn_penalty=0.1),
    "length": Shaping(overlong_len=2, overlong_buffer_len=3, overlong_penalty=0.5),
    "everything": Shaping(0.5, 0.1, 0.9, 0.05, 1, 4, 2.0),
}


def naive_reward(name: str, score: float, turns: int, tokens: int) -> float:
    if name == "scale":
        return 2 * score
    if name == "bounds":
        return sorted((0.2, score, 0.6))[1]
    if name == "turns":
        return score - 0.1 * turns
    if name == "length":
        # DAPO, equation 13, with 5 tokens at most, 3 of them a buffer, and half of its penalty.
        return score + 0.5 * (0.0 if tokens <= 2 else -1.0 if tokens > 5 else ((5 - 3) - tokens) / 3)
    return 0.5 * sorted((0.1, score, 0.9))[1] - 0.05 * turns - 2.0 * sorted((0.0, (tokens - 1) / 4, 1.0))[1]


@given(drawn=batches())
def test_an_estimator_compares_shaped_rewards(drawn):
    lengths = {id[0]: len(tokens) for id, tokens in walk(drawn.samples).items()}
    for name, shaping in SHAPINGS.items():
        groups = []
        for group in drawn.groups:
            verdicts = tuple(
                replace(v, total=naive_reward(name, v.total, len(e.turns), lengths.get(e.id, 0)))
                for e, v in zip(group.episodes, group.verdicts, strict=True)
            )
            groups.append(replace(group, verdicts=verdicts))
        changes = [
            after.total - before.total
            for group, shaped in zip(drawn.groups, groups, strict=True)
            for before, after in zip(group.verdicts, shaped.verdicts, strict=True)
        ]
        expected = drawn._replace(groups=groups).credit(GroupRelative())
        credit = drawn.credit(Shaped(GroupRelative(), shaping))
        assert close(credit.advantages, expected.advantages, 1e-4), name
        assert credit.metrics["reward_shaping"] == pytest.approx(fmean(changes), abs=1e-9), name


def test_each_shaping_is_its_own():
    points = [(score, turns, tokens) for score in (0.0, 0.5, 1.0) for turns in (1, 3) for tokens in (1, 4, 9)]
    values = {
        name: [shaping.reward(score, turns=turns, tokens=tokens) for score, turns, tokens in points]
        for name, shaping in SHAPINGS.items()
    }
    for name, own in values.items():
        assert own == pytest.approx([naive_reward(name, *point) for point in points])
        assert all(own != other for key, other in values.items() if key != name)


def test_scores_stay_what_they_were():
    drawn = batch([EpisodeSpec([1], 1.0), EpisodeSpec([2], 0.0)])
    before = [v.total for v in drawn.groups[0].verdicts]
    drawn.credit(Shaped(GroupRelative(), Shaping(3.0)))
    assert [v.total for v in drawn.groups[0].verdicts] == before


@pytest.mark.parametrize("settings", [{"low": 1.0, "high": 1.0}, {"overlong_buffer_len": 0}])
def test_shapings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=r"low < high|overlong_buffer_len"):
        Shaping(**settings)
