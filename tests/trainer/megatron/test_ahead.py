"""Layers that predict further ahead learn what the paper says, and nothing else learns from them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from agentrl.losses import LossOutput
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from tests.trainer.megatron.ahead import checkpoint_with, loss_by_hand
from tests.trainer.megatron.equality import (
    Part,
    gradients_in,
    gradients_of,
    place,
    places_of_experts,
    samples,
    share_of,
    weights,
)
from tests.trainer.megatron.models import model_of

pytestmark = pytest.mark.full

KINDS = ("glm4_moe", "deepseek_v3", "mimo")
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "EP2": {"expert_model_parallel_size": 2},
    "TP2+SP": SP,
    "TP2+SP, ETP1": {**SP, "expert_tensor_parallel_size": 1},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2, virtual": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "CP2": {"context_parallel_size": 2},
    "recomputed": {"recompute_granularity": "full"},
}


def part_of(layout: MegatronConfig, _rank: int, kind: str, depths: int, learns: bool = True) -> Part:
    """Runs in a rank: the gradient of a policy's loss, and of the layers' own. learns: whether they do."""
    from agentrl.trainer.megatron.model.ahead import AheadLoss
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of
    from agentrl.trainer.megatron.passes import Passes

    network = Network(shape_of(model_of(kind).config)._replace(ahead=depths), layout, bf16=False)
    network.load(checkpoint_with(kind, depths).__getitem__)
    passes = Passes(network, partial(logprobs_of, entropy_gradient=False))

    def loss(row, outputs):
        weight_N = torch.from_numpy(row.gather(weights()))
        return LossOutput(-(weight_N * outputs.logp_N).sum(), {})

    masks = [sample.loss_mask for sample in samples()]
    config = TrainerConfig(enable_mtp_training=True, mtp_loss_scaling_factor=1.0)
    ahead = AheadLoss.of(config, masks, depths) if learns else None
    reports = passes.learn(share_of(layout, samples()), loss, None, ahead)
    total = sum(float(metrics.get("mtp_loss", 0)) for metrics in reports)
    return Part(place(), places_of_experts(), [], gradients_in(network), total, {})


def check(ranks, kind: str, depths: int, **sizes) -> None:
    layout = MegatronConfig(actor_num_gpus_per_node=ranks.count, use_distributed_optimizer=False, **sizes)
    parts = ranks.run(part_of, layout, kind, depths)
    expected, gradients = loss_by_hand(kind, depths)
    last = layout.pipeline_model_parallel_size - 1
    telling = [part for part in parts if part.place[:2] == (0, last) and part.place[3] == 0]
    assert sum(part.loss for part in telling) == pytest.approx(expected, rel=1e-5)
    shape = shape_of(model_of(kind).config)._replace(ahead=depths)
    found = gradients_of(kind, shape, layout, parts)
    for name, gradient in gradients.items():
        if name.endswith("e_score_correction_bias"):
            continue
        assert gradient.norm() > 1e-6, f"{name} is not in play"
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize(
    ("kind", "depths"), [*((kind, 1) for kind in KINDS), ("deepseek_v3", 2), ("mimo", 2)]
)
def test_one_rank_learns_what_the_papers_formula_says(single, kind, depths):
    check(single, kind, depths)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("deepseek_v3", name) for name in LAYOUTS), *(("mimo", name) for name in ("TP2+SP", "PP2", "CP2"))],
)
def test_two_ranks_learn_the_same(pair, kind, name):
    check(pair, kind, 2, **LAYOUTS[name])


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_of_the_policy_depends_on_them(single, kind):
    layout = MegatronConfig(actor_num_gpus_per_node=1)
    (with_them,), (without,) = (single.run(part_of, layout, kind, 1, learns) for learns in (True, False))
    pairs = zip(with_them.gradients, without.gradients, strict=True)
    of_the_policy = [(own, other) for (name, own), (_, other) in pairs if not name.startswith("mtp.")]
    assert len(of_the_policy) > 30
    for own, other in of_the_policy:
        np.testing.assert_array_equal(own, other)
    assert not any(other.any() for name, other in without.gradients if name.startswith("mtp."))
