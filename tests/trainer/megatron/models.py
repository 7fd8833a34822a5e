"""Tiny random models of every family, with weights that no two layers share."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

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
    "glm4": lambda: Glm4Config(**SIZES),
}

MIXTURES = {kind for kind in CONFIGS if kind.endswith("_moe")}


def published(model: PreTrainedModel, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
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
    return model
