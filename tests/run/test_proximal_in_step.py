"""One optimizer step for a batch: its current logprobs are the proximal ones, and no pass computes them."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
import torch

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.filters import has_signal
from agentrl.assembly.algorithm import build_algorithm
from agentrl.errors import UserError
from agentrl.rollout.batch_functions import BatchFunctions
from agentrl.run.journal_entries import iteration_entries
from agentrl.run.loop import Loop
from agentrl.trainer.plan import Done, Worker
from agentrl.types import RolloutId
from tests.run.in_step import (
    CORRECTIONS,
    Noting,
    distance,
    expected_gradient,
    flat,
    iterations,
    near,
    split,
)
from tests.run.tables import TableTrainer, producer_of
from tests.run.test_whole_step import ALIKE, GROUPS, MAX_LENGTH
from tests.trainer.tiny import qwen3, trainer


@pytest.mark.parametrize("name", CORRECTIONS)
async def test_the_gradient_is_that_of_loops_over_tokens(name):
    settings, factors_of = CORRECTIONS[name]
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    expected = expected_gradient(model, groups, factors_of)
    _, noting, actual = await iterations(model, groups, settings)
    assert noting.num_scored == 0
    assert distance(actual, expected) <= 1e-6
    if name != "none":
        plain = expected_gradient(qwen3(), groups, lambda gaps: [1.0 for _ in gaps])
        assert distance(actual, plain) > 1e-3


SEEN = []


def halved(tokens, scores):
    """The root of the ratio, bounded above."""
    SEEN.append(len(tokens))
    return np.exp(np.minimum((scores.proximal_N - scores.behaviour_N) / 2.0, np.log(1.1)))


def doubled(tokens, scores):
    """The square of the ratio."""
    return np.exp(np.minimum(2.0 * (scores.proximal_N - scores.behaviour_N), 20.0))


async def test_the_factors_of_a_function_are_those_of_loops_and_it_sees_the_whole_batch():
    path = "tests.run.test_proximal_in_step:halved"
    model = qwen3()
    groups = near(model, GROUPS, 0.15)
    expected = expected_gradient(model, groups, lambda gaps: [min(exp(gap / 2.0), 1.1) for gap in gaps])
    settings = {"correction": "custom", "custom_tis_function_path": path}
    (result,), noting, actual = await iterations(model, groups, settings)
    assert noting.num_scored > 0
    assert distance(actual, expected) <= 1e-6
    plain = expected_gradient(qwen3(), groups, lambda gaps: [1.0 for _ in gaps])
    assert distance(actual, plain) > 1e-3
    sampled = sum(
        len(turn.tokens.completion.token_ids)
        for group in groups
        if has_signal(group)
        for episode in group.episodes
        for trajectory in episode.trajectories
        for turn in trajectory.turns
    )
    assert SEEN[-1] == sampled
    assert {"train/custom", "train/custom_factor", "train/custom_clipfrac"} <= result.metrics.keys()


OTHERS = {
    "gspo": {"advantage_estimator": "gspo", "correction": "tis"},
    "cispo": {"advantage_estimator": "cispo", "correction": "icepop"},
    "dppo": {"advantage_estimator": "dppo", "correction": "tis"},
    "vespo": {"advantage_estimator": "vespo", "correction": "mis", "mis_level": "token"},
    "opsm": {"correction": "opsm", "opsm_delta": 0.01},
    "an entropy bonus": {"correction": "tis", "entropy_coef": 0.01},
    "whitened": {"advantage_estimator": "reinforce_plus_plus_baseline", "correction": "tis"},
}


OF_THE_LOSS = ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss")


@pytest.mark.parametrize("name", [*CORRECTIONS, *OTHERS])
async def test_weights_metrics_and_journal_are_those_of_a_pass_of_its_own(name):
    settings = CORRECTIONS[name][0] if name in CORRECTIONS else OTHERS[name]
    results = {}
    for in_step in (True, False):
        model = qwen3(torch.float32)
        groups = near(model, [*GROUPS[:5], *map(split, GROUPS[5:])] if name in OTHERS else GROUPS, 0.15)
        results[in_step] = (*(await iterations(model, groups, settings, in_step=in_step)), model)
    (((ours,), noting, gradient, model), ((theirs,), scored, reference, other)) = (
        results[True],
        results[False],
    )
    assert noting.num_scored == 0
    assert scored.num_scored > 0
    assert distance(gradient, reference) <= 1e-6
    assert distance(model.state_dict(), other.state_dict()) <= 1e-6
    names = {name for name in theirs.metrics if not name.startswith("perf/")}
    assert names == {name for name in ours.metrics if not name.startswith("perf/")}
    assert {"train/train_rollout_ess", "train/train_rollout_max_ratio", "train/pg_loss"} <= names
    # A group that is masked as a whole was in the step, and counts in the means of its loss.
    is_masked = len(theirs.trained) < sum(map(has_signal, GROUPS)) and not name.startswith("an entropy")
    for metric in names - ({f"train/{name}" for name in OF_THE_LOSS} if is_masked else set()):
        assert ours.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-5, abs=1e-6), metric
    assert [g.id for g in ours.trained] == [g.id for g in theirs.trained]
    for entry, expected in zip(iteration_entries(ours), iteration_entries(theirs), strict=True):
        assert (entry.outcome, entry.reason) == (expected.outcome, expected.reason)
        assert entry.advantages.keys() == expected.advantages.keys()
        for agent, values in entry.advantages.items():
            np.testing.assert_allclose(values, expected.advantages[agent], rtol=1e-5, atol=1e-6)


NEEDED_FIRST = {
    "kl in the reward": {"kl_coef": 0.1, "correction": "tis"},
    "a teacher": {"use_opd": True, "opd_teacher_load": "x", "correction": "tis"},
    "otb": {"advantage_estimator": "otb", "correction": "tis"},
    "top_entropy": {"entropy_control": "top_entropy", "correction": "tis"},
    "clip_cov": {"entropy_control": "clip_cov", "correction": "tis"},
    "kl_cov": {"entropy_control": "kl_cov", "correction": "tis"},
    "self-normalised": {"self_normalize_correction": True, "correction": "tis"},
    "an estimator of one's own": {
        "custom_advantage_function_path": "tests.assembly.custom:estimator",
        "correction": "tis",
    },
    "masked tokens": {"mask_offpolicy_in_partial_rollout": True, "correction": "tis"},
    "a critic that learns alone": {
        "advantage_estimator": "ppo",
        "num_critic_only_steps": 3,
        "correction": "tis",
    },
}


@pytest.mark.parametrize("name", NEEDED_FIRST)
def test_what_needs_proximal_logprobs_before_the_step_has_its_pass(name):
    config = AlgorithmConfig(**NEEDED_FIRST[name])
    assert config.needs_proximal_first
    assert not AlgorithmConfig(correction="tis", use_kl_loss=True, kl_loss_coef=0.1).needs_proximal_first


def test_without_recomputed_proximal_logprobs_nothing_changes():
    assert build_algorithm(AlgorithmConfig(), max_length=9).uncorrected is None
    engine = AlgorithmConfig(use_rollout_logprobs=True)
    assert build_algorithm(engine, max_length=9, max_staleness=2).uncorrected is None


@pytest.mark.parametrize(
    ("options", "epochs"), [({"num_steps": 2}, 1), ({"num_epochs": 2}, 2)], ids=["steps", "epochs"]
)
async def test_several_updates_of_a_batch_have_its_pass(options, epochs):
    model = qwen3()
    settings = {"correction": "tis", "ppo_epochs": epochs}
    _, noting, _ = await iterations(model, near(model, GROUPS, 0.15), settings, **options)
    assert noting.num_scored > 0
    assert noting.updates == 2


@pytest.mark.parametrize(
    ("settings", "is_scored"),
    [
        ({"correction": "tis"}, False),
        ({"gate_statistic": "k2", "gate_over": "token"}, False),
        ({"correction": "mis", "mis_level": "token"}, False),
        ({"correction": "mis", "mis_level": "token", "mis_veto": 0.5}, True),
        ({"correction": "mis", "mis_level": "geometric", "mis_lower": 0.9, "mis_upper": 1.1}, True),
        ({"correction": "tis", "gate_statistic": "k3", "gate_over": "mean"}, True),
    ],
)
async def test_a_sequence_of_several_samples_has_its_pass_where_its_level_needs_it(settings, is_scored):
    """Its samples may be in different micro-batches, and a statistic is over all of them."""
    results = []
    for in_step in (True, False):
        model = qwen3()
        groups = near(model, map(split, GROUPS), 0.15)
        results.append(await iterations(model, groups, settings, in_step=in_step))
    (_, noting, gradient), (_, _, expected) = results
    assert bool(noting.num_scored) == is_scored
    assert distance(gradient, expected) <= 1e-6


async def test_samples_that_are_not_in_the_step_are_scored_and_no_others():
    """A filter takes rollouts out of the loss; the gauges of the batch are of all tokens."""
    removed = {RolloutId("a.0"): "long", RolloutId("c.0"): "long", RolloutId("c.1"): "odd"}
    metrics = []
    for in_step in (True, False):
        model = qwen3()
        (iteration,), noting, _ = await iterations(
            model,
            near(model, GROUPS, 0.15),
            {"correction": "tis", "tis_clip": 1.1},
            in_step=in_step,
            functions=BatchFunctions(lambda groups: removed),
        )
        metrics.append({k: v for k, v in iteration.metrics.items() if k.startswith("train/")})
        # a, c, e and g have signal.
        assert noting.num_scored == (3 if in_step else 10)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)


async def test_a_batch_without_a_step_has_its_gauges():
    model = qwen3()
    settings = {"correction": "tis", "advantage_estimator": "dr_grpo", "shaping_scale": 2.0}
    (iteration,), noting, _ = await iterations(model, near(model, ALIKE, 0.15), settings)
    assert (noting.num_scored, noting.updates) == (4, 0)
    assert iteration.metrics["train/train_rollout_kl_k3"] > 0
    assert iteration.metrics["train/optimizer_steps"] == 0


async def test_a_step_whose_tokens_are_all_masked_changes_nothing(tmp_path):
    """Not even by the momentum of the steps before, or by weight decay: with a pass, it is left out."""
    settings = {"gate_statistic": "k2", "gate_over": "token", "gate_upper": 0.02}
    model = qwen3()
    algorithm = build_algorithm(AlgorithmConfig(**settings), max_length=MAX_LENGTH, max_staleness=2)
    inner = trainer(model, algorithm.loss, lr=1e-2, weight_decay=0.1)
    batches = [near(model, GROUPS, 0.1), near(model, GROUPS, 0.1, drift=9.0), near(model, GROUPS, 0.1)]
    loop = Loop(producer_of(batches), Noting(inner), algorithm, None, 1)
    first = await loop.iterate(0)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masked = await loop.iterate(1)
    assert first.metrics["train/optimizer_steps"] == 1
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert loop.trainer.updates == 2
    assert (loop.version, masked.metrics["train/optimizer_steps"]) == (1, 0)
    assert "train/loss" not in masked.metrics
    assert masked.metrics["train/gate_masked"] == 1.0
    assert masked.trained == []
    assert {entry.reason for entry in iteration_entries(masked)} == {"zero_std", "zero_advantage"}
    await loop.iterate(2)
    (saved,) = inner.ranks.call(Worker.save, tmp_path)
    assert (loop.version, saved) == (2, (2, {"old": Done(2, 0)}))


async def test_a_group_that_is_masked_as_a_whole_is_dropped():
    model = qwen3()
    far = [near(model, GROUPS[:1], 0.01, drift=5.0)[0], *near(model, GROUPS[1:], 0.01)]
    settings = {"gate_statistic": "k1", "gate_over": "mean", "gate_upper": 0.5}
    (iteration,), noting, gradient = await iterations(model, far, settings)
    assert noting.num_scored == 0
    assert [group.id for group in iteration.trained] == ["c", "e", "g"]
    reasons = {entry.episode.id[0]: entry.reason for entry in iteration_entries(iteration)}
    assert reasons == {"a": "zero_advantage", **dict.fromkeys("bdf", "zero_std"), **dict.fromkeys("ceg", "")}
    advantages_a = [e.advantages["agent"] for e in iteration_entries(iteration) if e.episode.id[0] == "a"]
    assert not np.concatenate(advantages_a).any()
    assert flat(gradient).norm() > 0


async def test_logprobs_that_are_not_finite_are_refused_and_change_no_weight():
    class Broken(TableTrainer):
        async def update(self, batch):
            report = await super().update(batch)
            return report._replace(logprobs=tuple(array * np.nan for array in report.logprobs))

    algorithm = build_algorithm(AlgorithmConfig(correction="tis"), max_length=MAX_LENGTH)
    loop = Loop(producer_of([GROUPS]), Broken(algorithm.loss), algorithm, None, 1)
    with pytest.raises(UserError, match="proximal logprobs must be finite"):
        await loop.iterate(0)
