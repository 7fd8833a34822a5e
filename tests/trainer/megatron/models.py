"""Tiny random models of every family, with weights that no two layers share."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from agentrl.weights.model_types import AutoConfig, AutoModelForCausalLM

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
ROUTED = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
LATENT = {
    **{name: size for name, size in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# As Kimi K2 has it: no channel lies between the two betas.
STEEP = {**YARN, "rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0}
HALF = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
# Each key head serves two value heads; four ranks can share them.
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
NO_ENDS = {"bos_token_id": None, "eos_token_id": None}
# The samples of `equality` hold both pad tokens, which learn nothing as inputs.
CONFIGS = {
    "llama": lambda: LlamaConfig(**{**SIZES, "pad_token_id": 26}),
    "llama, scaled": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2": lambda: Qwen2Config(**{**SIZES, "pad_token_id": 76}, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3, tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE, num_experts=4, mlp_only_layers=[1]),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, **MOE, num_experts=4, shared_expert_intermediate_size=40, decoder_sparse_step=2
    ),
    # Its first three layers are linear.
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **MOE, **DELTA, num_experts=4, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**SIZES, **DELTA),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **{name: size for name, size in SIZES.items() if name != "intermediate_size"},
        **MOE,
        **DELTA,
        num_experts=4,
        shared_expert_intermediate_size=40,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_experts_per_tok=2, num_local_experts=4),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **ROUTED, attention_bias=True, use_qk_norm=True),
    "glm4_moe, plain": lambda: Glm4MoeConfig(**SIZES, **{**ROUTED, "n_group": 1}),
    "deepseek_v2": lambda: DeepseekV2Config(
        **LATENT, **ROUTED, q_lora_rank=24, topk_method="group_limited_greedy", norm_topk_prob=True
    ),
    "deepseek_v2, greedy": lambda: DeepseekV2Config(
        **LATENT, **ROUTED, q_lora_rank=None, topk_method="greedy", rope_parameters=YARN
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT, **ROUTED, q_lora_rank=24),
    "deepseek_v3, yarn": lambda: DeepseekV3Config(
        **LATENT, **{**ROUTED, "n_group": 1}, q_lora_rank=None, rope_interleave=False, rope_parameters=YARN
    ),
    # The options of Moonlight.
    "deepseek_v3, plain": lambda: DeepseekV3Config(
        **LATENT, **{**ROUTED, "n_group": 1, "routed_scaling_factor": 2.446}, q_lora_rank=None
    ),
    "kimi_k2": lambda: AutoConfig.for_model(
        "kimi_k2",
        **LATENT,
        **{**ROUTED, "n_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
        q_lora_rank=24,
        rope_parameters=STEEP,
        num_nextn_predict_layers=0,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **SIZES, num_experts_per_tok=3, num_local_experts=4, rope_parameters=HALF, **NO_ENDS
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    # Shorter than most samples of `equality`.
    "mistral, windows": lambda: MistralConfig(**SIZES, sliding_window=5),
    "qwen3, windows": lambda: Qwen3Config(**SIZES, **WINDOWS),
    "glm4": lambda: Glm4Config(**SIZES),
    "mimo": lambda: AutoConfig.for_model("mimo", **SIZES, num_nextn_predict_layers=1),
    "gemma3_text": lambda: Gemma3TextConfig(
        **{**SIZES, "pad_token_id": 26},
        **NO_ENDS,
        sliding_window=5,
        sliding_window_pattern=2,
        query_pre_attn_scalar=20,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        },
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        num_experts_per_tok=2,
        num_local_experts=4,
        sliding_window=5,
        swiglu_limit=1.5,
        rope_parameters={
            **{name: value for name, value in YARN.items() if not name.startswith("mscale")},
            "truncate": False,
        },
    ),
}

FAMILIES_OF_EXPERTS = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3", "minimax_m2"),
    *("gpt_oss", "kimi_k2", "qwen3_next", "qwen3_5_moe_text"),
)
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with layers of linear attention."""
MIXTURES = {kind for kind in CONFIGS if kind.split(",")[0] in FAMILIES_OF_EXPERTS}


def checkpoint_of(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """A model's tensors, or others by its names, by those of its checkpoints: experts one by one."""
    return revert_weight_conversion(model, model.state_dict() if tensors is None else tensors)


def model_of(kind: str) -> PreTrainedModel:
    """The same in every process."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                # A state that forgets half of all in ten tokens, not in a fifth of one.
                parameter.sub_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model
