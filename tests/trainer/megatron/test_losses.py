"""Every layout gives policy and critic the gradients that the torch trainer gives them, under real losses."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
import torch

from agentrl.algorithms.weights import constant, rollout_mean, sample_mean, token_mean
from agentrl.losses import KlTerm, PolicyLoss, ValueLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning, critic_metrics, step_metrics
from agentrl.trainer.torch import Critic, critic_over
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.trainer.torch.learner import Learner as TorchLearner
from agentrl.types import Credit, RolloutId, Scores, TrainBatch
from tests.trainer.megatron import equality
from tests.trainer.megatron.layouts import covering_layouts, sizes_of
from tests.trainer.megatron.models import SIZES, checkpoint_of, model_of
from tests.trainer.megatron.test_equality import PAIRS
from tests.trainer.megatron.together import Ranks
from tests.trainer.tiny import gradients_of, settings

WEIGHTINGS = {
    "token mean": token_mean,
    "sample mean": sample_mean,
    "rollout mean": rollout_mean,
    "constant": partial(constant, max_length=40),
}
LOSSES = {
    "grpo": PolicyLoss(kl=KlTerm(0.1)),
    "gspo": PolicyLoss(objective="gspo", eps_clip=3e-4, eps_clip_high=4e-4),
    "gmpo": PolicyLoss(objective="gmpo", eps_clip=0.05, eps_clip_high=0.05),
    "sapo": PolicyLoss(objective="sapo"),
    "vespo": PolicyLoss(objective="vespo"),
    "dppo": PolicyLoss(objective="dppo_kl", eps_clip=1e-3, eps_clip_high=1e-3),
    "ppo": PolicyLoss(entropy_coef=0.01),
}
VALUE_LOSS = ValueLoss(value_clip=0.3)


@lru_cache
def batch(weighting: str, *, first_only: bool = False) -> TrainBatch:
    """Episodes of up to three samples each; old logprobs so near that some ratios are clipped.

    one: only the first has tokens to learn from, so a second replica, or a second row, has none.
    """
    draw = np.random.default_rng(11)
    samples = tuple(replace(s, rollout_id=RolloutId(f"r{n // 3}")) for n, s in enumerate(equality.samples()))
    if first_only:
        samples = samples[:1] + tuple(replace(s, loss_mask=s.loss_mask & False) for s in samples[1:])

    def near(by_sample, spread: float):
        arrays = []
        for number, sample in enumerate(samples):
            values = np.zeros(len(sample), np.float32)
            at = equality.samples()[number].loss_mask
            values[at] = by_sample[number] + draw.normal(0, spread, at.sum())
            arrays.append((values * sample.loss_mask).astype(np.float32))
        return tuple(arrays)

    logprobs, zeros = equality.oracle("qwen3").logps, dict.fromkeys(range(len(samples)), 0.0)
    scores = Scores(near(logprobs, 0.2), ref=near(logprobs, 0.5), values=near(zeros, 0.5))
    credit = Credit(near(zeros, 1.0), WEIGHTINGS[weighting](samples), near(zeros, 1.0))
    return TrainBatch(samples, scores, credit)


def head_weight() -> torch.Tensor:
    """A critic that begins with 0 would have no gradient below its head."""
    return 0.3 * torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(9))


def part_of(layout: MegatronConfig, _rank: int, kind: str, loss: str, train_batch: TrainBatch):
    """Runs in a rank: the gradients of policy and critic, and what they say."""
    from agentrl.trainer.loss_inputs import StepInputs
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.families import VALUE_HEAD
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of, values_of

    model = model_of(kind)
    shape, weights = shape_of(model.config), {**checkpoint_of(model), VALUE_HEAD: head_weight()}
    output_functions = {"policy": partial(logprobs_of, entropy_gradient=loss == "ppo"), "critic": values_of}
    by_network = {}
    for name, outputs in output_functions.items():
        network = Network(shape if name == "policy" else shape.of_a_critic, layout, bf16=False)
        network.load(weights.__getitem__)
        used = LOSSES[loss] if name == "policy" else VALUE_LOSS
        learner = MegatronLearner(network, outputs, Learning(used, settings(), 10))
        sums = learner.backward(equality.share_of(layout, train_batch.samples), StepInputs(train_batch))
        gradients = equality.gradients_in(network)
        by_network[name] = (
            equality.Part(
                equality.place(), equality.places_of_experts(), [], gradients, sums.get("loss", 0.0), {}
            ),
            sums,
        )
    return by_network


@lru_cache
def expected(kind: str, loss: str, weighting: str, first_only: bool):
    """What the torch trainer's learners do: by network, gradients by name and metrics."""
    train_batch, by_network = batch(weighting, first_only=first_only), {}
    policy = model_of(kind)
    forward = partial(token_outputs, bf16=False, entropy_gradient=loss == "ppo")
    learner = TorchLearner(TorchNetwork(policy), forward, Learning(LOSSES[loss], settings(), 10))
    with gradients_of(policy) as gradients:
        by_network["policy"] = gradients, step_metrics([learner.learn(train_batch)], train_batch)
    network = critic_over(model_of(kind))
    with torch.no_grad():
        network.get_output_embeddings().weight.copy_(head_weight())
    critic = Critic(network, Learning(VALUE_LOSS, settings(), 10))
    with gradients_of(network) as gradients:
        by_network["critic"] = (
            gradients,
            critic_metrics(step_metrics([critic.learn(train_batch)], train_batch)),
        )
    gradients["score.weight"] = gradients.pop("lm_head.weight")
    return by_network


def check(ranks: Ranks, loss: str, weighting: str, *, first_only: bool = False, kind: str = "qwen3", **sizes):
    # The distributed optimizer leaves each rank with the part of a gradient that it steps with.
    layout = MegatronConfig(actor_num_gpus_per_node=ranks.count, use_distributed_optimizer=False, **sizes)
    train_batch, shape = batch(weighting, first_only=first_only), shape_of(model_of(kind).config)
    parts = ranks.run(part_of, layout, kind, loss, train_batch)
    for name, (gradients, metrics) in expected(kind, loss, weighting, first_only).items():
        of = shape if name == "policy" else shape.of_a_critic
        gradients_ = equality.gradients_of(kind, of, layout, [part[name][0] for part in parts])
        assert gradients_.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            assert gradient.norm() > 0, f"{parameter} is not in play"
            # A norm alone would hide shards that changed places.
            assert (gradients_[parameter] - gradient).norm() <= 1e-5 * gradient.norm(), (name, parameter)
        sums = [part[name][1] for part in parts]
        metrics_ = metrics.keys() & set().union(*sums)
        assert {"loss", "pg_loss"} <= metrics_ or "value_loss" in metrics_
        for metric in metrics_:
            total = sum(sums_.get(metric, 0.0) for sums_ in sums)
            mean = total if metric == "loss" else total / train_batch.num_loss_tokens
            assert mean == pytest.approx(metrics[metric], rel=1e-4, abs=1e-5), (name, metric)


# Every loss and every weighting on two ranks; their pairs, with every option, in the longer tier.
QUICK = {
    "DP2": ("grpo", "rollout mean"),
    "TP2": ("ppo", "constant"),
    "TP2+SP": ("gspo", "token mean"),
    "PP2": ("ppo", "sample mean"),
    "PP2, virtual": ("grpo", "token mean"),
    "PP2, uneven": ("grpo", "sample mean"),
    "CP2": ("gspo", "rollout mean"),
}


@pytest.mark.parametrize("layout", PAIRS)
def test_two_ranks_learn_as_one_does(pair, layout):
    check(pair, *QUICK[layout], **PAIRS[layout])


@pytest.mark.parametrize("layout", ["DP2", "CP2", "PP2, virtual"])
def test_where_one_rank_has_nothing_to_learn_from(pair, layout):
    check(pair, "grpo", "token mean", first_only=True, **PAIRS[layout])


CASES = covering_layouts(loss=tuple(LOSSES), weighting=tuple(WEIGHTINGS))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_learn_under_every_two_of_options_losses_and_weightings(four, name):
    case = CASES[name]
    check(four, case["loss"], case["weighting"], **sizes_of(case))
