"""The speed of a layout on paper: near what others have published, and ordered as the network says."""

from __future__ import annotations

from math import prod

import pytest

from agentrl.assembly.speed import (
    H100,
    Work,
    _attention,
    _linear_attention,
    tokens_per_s,
    trainer_speed,
)
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.weights.hf.tensors import tensor_shapes
from tests.sizes import DEEPSEEK_V3, GLM45_AIR, QWEN3_30B_A3B, QWEN3_NEXT, opened


def layout_of(gpus, **sizes):
    common = {"recompute_granularity": "full", "expert_tensor_parallel_size": 1}
    return MegatronConfig(actor_num_nodes=gpus // 8, actor_num_gpus_per_node=8, **{**common, **sizes})


# Its 61 layers are in 32 stages of one or two there; the ranks with 16 layers decide, as if all had 16.
SHARED_OUT = {**DEEPSEEK_V3, "num_hidden_layers": 64}
PP4 = {"pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 8}
# NVIDIA-NeMo/Automodel, docs/performance-summary.md and examples/benchmark/configs (October 2025): DGX H100,
# bfloat16, sequences of 4,096, DeepEP, layers recomputed, experts balanced by force. Tokens/s of a GPU.
PUBLISHED = {
    "Qwen3-30B-A3B on 8": (QWEN3_30B_A3B, 8, {"expert_model_parallel_size": 8}, 16, 16384, 12_040),
    "DeepSeek-V3 on 256": (SHARED_OUT, 256, {**PP4, "expert_model_parallel_size": 64}, 8, 4096, 1_002),
    "DeepSeek-V3 on 1,024": (SHARED_OUT, 1024, {**PP4, "expert_model_parallel_size": 64}, 32, 4096, 865),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rates_of_training_are_predicted_within_30_percent(name):
    config, gpus, sizes, rows, tokens, published = PUBLISHED[name]
    layout = layout_of(gpus, **sizes)
    rate = tokens_per_s(opened(config), layout, Work(rows, tokens, 4096, sends_once=True))
    assert rate / gpus == pytest.approx(published, rel=0.3)


def learn_s(config, gpus, *, tokens=16384, offloads=False, hardware=H100, **sizes):
    """A step of eight rows of each replica, for a token."""
    layout = layout_of(gpus, sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1, **sizes)
    speed = trainer_speed(opened(config), layout, Work(8, tokens, 4096), hardware, offloads=offloads)
    return (8 * speed.learn + speed.step) / (8 * tokens * layout.data_parallel_size)


TP4, EP8 = {"tensor_model_parallel_size": 4}, {"expert_model_parallel_size": 8}


def test_experts_within_a_machine_are_faster_than_over_two():
    pipeline = learn_s(GLM45_AIR, 16, **TP4, **EP8, pipeline_model_parallel_size=2)
    assert pipeline < learn_s(GLM45_AIR, 16, **TP4, expert_model_parallel_size=16)
    # Where the network is as fast as inside a machine, there is nothing to gain.
    fast = H100._replace(across=H100.inside)
    pipeline = learn_s(GLM45_AIR, 16, hardware=fast, **TP4, **EP8, pipeline_model_parallel_size=2)
    assert pipeline > learn_s(GLM45_AIR, 16, hardware=fast, **TP4, expert_model_parallel_size=16)


def test_a_window_saves_what_lies_before_it():
    def of(window):
        config = {**QWEN3_30B_A3B, "use_sliding_window": True, "sliding_window": window}
        return learn_s(config, 8, **EP8)

    # Sequences have 4,096 tokens.
    assert of(512) < of(1024) < of(4096) == learn_s(QWEN3_30B_A3B, 8, **EP8)


def test_linear_attention_costs_the_same_for_a_token_of_any_sequence():
    def of(kind, length):
        config = opened({**QWEN3_NEXT, "layer_types": [kind] * QWEN3_NEXT["num_hidden_layers"]})
        return trainer_speed(config, layout_of(8, **EP8), Work(8, 65536, length)).forward

    assert of("linear_attention", 65536) == of("linear_attention", 4096)
    assert of("linear_attention", 65536) < 0.5 * of("full_attention", 65536)


def test_the_matrices_of_a_layer_are_those_of_its_tensors():
    """Without what all layers have: norms, routers, experts."""
    config = opened(QWEN3_NEXT)
    shape, shapes = shape_of(config), tensor_shapes(config)
    for layer, (matrices, _) in ((0, _linear_attention(shape)), (3, _attention(shape))):
        own = [size for name, size in shapes.items() if f"layers.{layer}." in name and "attn." in name]
        assert matrices == sum(prod(size) for size in own if len(size) == 2)


def test_shards_of_experts_cost_more_than_whole_ones():
    whole = learn_s(QWEN3_30B_A3B, 8, **TP4, **EP8)
    assert whole < learn_s(
        QWEN3_30B_A3B, 8, **TP4, expert_model_parallel_size=2, expert_tensor_parallel_size=4
    )


def test_an_optimizer_in_the_cpus_memory_costs_time():
    assert learn_s(QWEN3_30B_A3B, 8, **TP4, **EP8, offloads=True) > learn_s(QWEN3_30B_A3B, 8, **TP4, **EP8)
