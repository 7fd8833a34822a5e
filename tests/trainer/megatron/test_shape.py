"""Sizes are read from the checkpoint; what Megatron cannot do, or what contradicts it, is a sentence."""

from __future__ import annotations

import pytest
from transformers import (
    Glm4Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from agentrl.errors import ConfigError, ModelLoadError
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import check_layout, shape_of
from tests.trainer.megatron.models import DELTA, MOE, SIZES

SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "no table for models of type `gpt2`, only for llama, qwen2, qwen3, qwen3_moe, "),
        (Glm4Config(**SIZES, sliding_window=8), "glm4 has windows of attention"),
        (LlamaConfig(**SIZES, attention_bias=True), "llama has biases in its layers"),
        (Qwen3Config(**SIZES, hidden_act="gelu"), "qwen3 has the activation gelu"),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), r"scales its rotary positions .* \(`dynamic`\)"),
    ],
)
def test_what_megatron_would_do_otherwise_is_refused(config, message):
    with pytest.raises(ModelLoadError, match=message):
        shape_of(config)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (Qwen2Config(**SIZES, **SLIDING), [None, None, None, 8]),
        (Qwen2Config(**SIZES, **{**SLIDING, "use_sliding_window": False}), [None] * 4),
        (Qwen2MoeConfig(**SIZES, **MOE, **SLIDING), [8, None, 8, None]),
        (Qwen3MoeConfig(**SIZES, **MOE, **SLIDING), [8] * 4),
        (MixtralConfig(**SIZES, sliding_window=8), [8] * 4),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_each_layer_has_the_window_that_transformers_gives_it(config, windows):
    shape = shape_of(config)
    assert [layer.window for layer in shape.attention_by_layer] == windows


EXPERTS = Qwen3MoeConfig(**SIZES, **MOE, num_experts=6)
TP = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 4}


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            Qwen3Config(**SIZES),
            {"expert_model_parallel_size": 2},
            "for a model with experts, and this one has",
        ),
        (Qwen3Config(**SIZES), {"expert_tensor_parallel_size": 2}, "for a model with experts, and this one"),
        (EXPERTS, TP, "would each send all tokens to the experts; set sequence_parallel = true"),
        (EXPERTS, {"expert_model_parallel_size": 4}, "= 4 does not divide the model's 6 experts; lower it"),
        (EXPERTS, {"expert_tensor_parallel_size": 16}, "= 16 does not divide the model's 24 channels of an"),
    ],
)
def test_experts_that_cannot_be_shared_so_are_refused(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(shape_of(config), MegatronConfig(**settings))


@pytest.mark.parametrize("sizes", [{"tensor_model_parallel_size": 8}, {**TP, "context_parallel_size": 4}])
def test_ranks_that_do_not_divide_the_heads_of_linear_attention_are_refused(sizes):
    config = Qwen3NextConfig(**{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 8}, **MOE, **DELTA)
    layout = MegatronConfig(sequence_parallel=True, **sizes)
    with pytest.raises(ConfigError, match=r"= 8 ranks share .* do not divide its 4 heads of keys; lower one"):
        check_layout(shape_of(config), layout)


def test_the_vocabulary_is_filled_up_to_a_share_for_every_rank():
    shape = shape_of(Qwen3Config(**SIZES))
    assert [shape.dims(ranks).padded_vocab for ranks in (1, 2, 4)] == [97, 98, 100]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 3}, "= 3 must be a multiple of"),
        ({"sequence_parallel": True}, "needs tensor_model_parallel_size of at least 2"),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            "needs pipeline_model_parallel_size of at least 2; raise it",
        ),
        (
            {"expert_model_parallel_size": 2, "actor_num_gpus_per_node": 3},
            "the 3 ranks of a stage must be a multiple of expert_model_parallel_size x",
        ),
    ],
)
def test_a_layout_that_does_not_come_out_even_is_refused(settings, message):
    layout = MegatronConfig(**settings)
    with pytest.raises(ValueError, match=message):
        layout.check_ranks()
