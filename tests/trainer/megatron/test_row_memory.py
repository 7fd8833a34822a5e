"""The memory of experts on paper: what ranks allocate for them, and what a row takes on its way."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config, Glm4MoeConfig, Qwen3MoeConfig, Qwen3NextConfig

from agentrl.assembly.layout_memory import rank_memory
from agentrl.assembly.memory import Networks
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import learning_of, shape_of
from tests.trainer.megatron.allocating import allocated, row
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import settings

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
PAIRS = {
    "EP2": EP,
    "TP2": TP,
    "TP2, EP2": {**TP, **EP, **ETP1},
}
ALLOCATED = {
    "EP2": ("deepseek_v3", True, EP),
    "PP2": ("qwen2_moe", True, PP),
    "ETP2, biases": ("gpt_oss", False, {"expert_tensor_parallel_size": 2}),
    "CP2, EP2": ("glm4_moe", True, {**CP, **EP}),
    "CP2, linear": ("qwen3_next", True, CP),
    # In bf16 half of an expert would be too narrow for a grouped product.
    "TP2": ("deepseek_v3", False, TP),
    "TP2, EP2": ("glm4_moe", False, {**TP, **EP, **ETP1}),
}
FOURS = {
    "DP4, EP2: experts on two replicas, all else on four": EP,
    "EP4: each expert on one rank": {"expert_model_parallel_size": 4},
    "TP2, EP2": {**TP, **EP, **ETP1},
    "TP2, ETP2, EP2": {**TP, **EP},
    "PP2, EP2": {**PP, **EP},
    "CP2, EP4": {**CP, "expert_model_parallel_size": 4},
}
KINDS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen2_moe")


def check(ranks, kind, sizes, bf16):
    layout = MegatronConfig(actor_num_gpus_per_node=ranks.count, **sizes)
    networks, trainer = Networks(model_of(kind).config), settings(bf16=bf16)
    for rank, (weights, gradients, optimizer) in enumerate(ranks.run(allocated, layout, kind, trainer)):
        # Ranks are numbered by tensor, context, data; the last are those of the last stage.
        stage = rank * layout.pipeline_model_parallel_size // ranks.count
        expected = rank_memory(networks, layout, trainer, 16, stage)
        assert (weights, gradients) == (expected.weights, expected.gradients)
        # Of a buffer that ranks share, the padding belongs to no parameter.
        padding = 0.1 * expected.optimizer if layout.shares_the_optimizer else 0
        assert expected.optimizer - padding <= optimizer <= expected.optimizer


@pytest.mark.parametrize("name", ALLOCATED)
def test_two_ranks_allocate_for_experts_what_the_formula_gives(pair, name):
    kind, bf16, sizes = ALLOCATED[name]
    check(pair, kind, sizes, bf16)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOURS)
def test_four_ranks_allocate_for_experts_what_the_formula_gives(four, name, kind):
    check(four, kind, FOURS[name], bf16="ETP2" not in name)


# Wide enough that what a layer keeps outweighs what a row keeps once.
WIDE = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "moe_intermediate_size": 96,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 64,
}
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**WIDE, **HEADS, num_experts=8),
    "glm4_moe": lambda: Glm4MoeConfig(**WIDE, **HEADS, **ROUTED, first_k_dense_replace=1),
    "deepseek_v3": lambda: DeepseekV3Config(**WIDE, **LATENT, **ROUTED, first_k_dense_replace=1),
    "qwen3_next": lambda: Qwen3NextConfig(**WIDE, **HEADS, **LINEAR, num_experts=8),
}
TOKENS = 384


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["EP2", "TP2", "TP2, EP2"])
def test_a_row_takes_near_what_the_formula_gives(pair, name, kind, bf16):
    """Which experts are chosen is left to chance, so it is the mean of the ranks."""
    layout, config = MegatronConfig(actor_num_gpus_per_node=2, **PAIRS[name]), MODELS[kind]()
    memory = rank_memory(Networks(config), layout, settings(bf16=bf16), TOKENS, 0)
    rows = pair.run(row, layout, config, bf16, TOKENS)
    kept, peak = (sum(each) / len(rows) for each in zip(*rows, strict=True))
    held = memory.activations + memory.logits
    assert kept / held == pytest.approx(1, abs=0.15)
    assert peak / (held + memory.dispatch) == pytest.approx(1, abs=0.2)


def test_a_routers_bias_never_learns_whatever_else_does():
    shape = shape_of(model_of("glm4_moe").config)
    for names in ({}, {"freeze_params_name_list": ["embed"]}, {"only_train_params_name_list": [r"\.gate\."]}):
        chosen = learning_of(shape, settings(**names))
        assert chosen
        assert all(placed.rule.learns for placed in chosen)
