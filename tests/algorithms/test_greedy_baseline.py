"""ReMax: the greedy sibling is a baseline, and is not trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.group_relative import GreedyBaseline
from agentrl.algorithms.rewards import KlPenalty
from agentrl.algorithms.steps import RolloutBatch
from agentrl.algorithms.tokens import Tokens
from agentrl.algorithms.weights import token_mean, ungrouped
from agentrl.assembly.algorithm import build_estimator
from agentrl.types import AGENT, Group, Scores, Verdict
from tests.algorithms.episodes import TASK, episode, turn


def group_of(id: str, rewards: list[float], greedy: int = -1) -> Group:
    """Episodes of two tokens; the one at `greedy` took the likeliest ones."""
    episodes = tuple(
        episode(f"{id}.{i}", [turn([1], [2, 3], temperature=float(i != greedy % len(rewards)))])
        for i in range(len(rewards))
    )
    verdicts = tuple(Verdict(e.id, "s", reward) for e, reward in zip(episodes, rewards, strict=True))
    return Group(id, TASK, 0, episodes, verdicts)


GROUPS = [group_of("a", [1.0, 0.0, 0.25]), group_of("b", [0.5, 0.75], greedy=0)]


def credited(groups, estimator=None):
    batch = RolloutBatch.of(groups, is_idle=lambda _: False)
    scores = Scores(tuple(sample.logprobs for sample in batch.tokens.samples))
    estimator = estimator or GreedyBaseline()
    return batch, scores, estimator(batch.groups, batch.tokens, batch.tokens.scores(scores))


@pytest.mark.parametrize(
    "estimator", [GreedyBaseline(), build_estimator(AlgorithmConfig(advantage_estimator="remax"))]
)
def test_rewards_are_compared_with_that_of_the_greedy_sibling(estimator):
    batch, _, advantages = credited(GROUPS, estimator)
    by_rollout = batch.tokens.by_rollout(advantages.advantages_N)
    assert {id.episode: values.tolist() for id, values in by_rollout.items()} == {
        "a.0": [0.75],
        "a.1": [-0.25],
        "b.1": [0.25],
    }


def test_the_greedy_sibling_counts_in_no_weight_and_no_forward_pass():
    batch, scores, advantages = credited(GROUPS)
    (step,) = batch.steps(scores, advantages, ungrouped(token_mean), num_steps=1, policy_term_only=True)
    assert [sample.rollout_id.episode for sample in step.batch.samples] == ["a.0", "a.1", "b.1"]
    weights = np.concatenate(step.batch.credit.weights)
    assert weights[weights > 0].tolist() == pytest.approx([1 / 6] * 6)
    assert [sample.rollout_id.episode for sample in batch.played] == ["a.0", "a.1", "a.2", "b.0", "b.1"]


def test_where_all_are_greedy_none_is_a_baseline():
    alike = [replace(e, id=e.id) for e in group_of("c", [1.0], greedy=0).episodes]
    group = Group("c", TASK, 0, tuple(alike), (Verdict("c.0", "s", 1.0),))
    assert group.episodes[0].is_greedy
    assert group.greedy == ()
    assert [e.id for e in GROUPS[0].greedy] == ["a.2"]


def test_a_penalty_is_subtracted_as_from_any_other():
    batch = RolloutBatch.of(GROUPS, is_idle=lambda _: False)
    logprobs = tuple(sample.logprobs for sample in batch.tokens.samples)
    ref = tuple(values - 0.5 for values in logprobs)
    scores = batch.tokens.scores(Scores(logprobs, ref))
    plain = GreedyBaseline()(GROUPS, batch.tokens, scores).advantages_N
    penalised = GreedyBaseline(KlPenalty(0.2))(GROUPS, batch.tokens, scores).advantages_N
    # Each token is credited with 0.2 x 0.5 from itself and from the tokens after it.
    assert (plain - penalised).tolist() == pytest.approx([0.2, 0.1] * 3)


def test_a_group_without_a_greedy_sibling_is_named():
    sampled = replace(GROUPS[0], episodes=GROUPS[0].episodes[:2], verdicts=GROUPS[0].verdicts[:2])
    with pytest.raises(ValueError, match="group a has none"):
        credited([sampled])
    assert Tokens.of([]).rollout_ids == ()
    assert AGENT in GROUPS[0].trained_agents
