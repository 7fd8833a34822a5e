"""A tiny random model of each family of causal language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from agentrl.weights.model_types import AutoConfig, AutoModelForCausalLM
from tests.trainer.tiny import SHAPE, VOCAB

_MOE = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 4}
_ROUTED = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_hidden_layers": 4,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_DEEPSEEK = {**_ROUTED, **_LATENT, "topk_group": 1, "first_k_dense_replace": 1}
_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_OLD = {**_ENDS, "vocab_size": VOCAB, "n_layer": 2, "n_head": 4}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 8,
    "factor": 4.0,
}

PACKED: Mapping[str, tuple[str, dict[str, object]]] = {
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "gemma": ("GemmaConfig", {}),
    "glm": ("GlmConfig", {}),
    "glm4": ("Glm4Config", {}),
    "glm4_moe": ("Glm4MoeConfig", {**_ROUTED, "topk_group": 1, "first_k_dense_replace": 1}),
    "gpt2": ("GPT2Config", {**_OLD, "n_embd": 16, "n_positions": 256}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mimo": ("mimo", {}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmo2": ("Olmo2Config", {}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 1.0}),
    "phi3": ("Phi3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 12}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
}
"""Families whose sequences share a row: their configuration's class, or their type where transformers has
none of it, and what differs from SHAPE."""

FOLDED: Mapping[str, tuple[str, dict[str, object]]] = {
    "bloom": ("BloomConfig", {**_OLD, "hidden_size": 16}),
    "cohere2": ("Cohere2Config", {"sliding_window": 4}),
    # Their values are as wide as other models' queries; their queries are wider.
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "exaone4": ("Exaone4Config", {}),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4}),
    "gemma2": ("Gemma2Config", {"sliding_window": 4, "query_pre_attn_scalar": 4}),
    "gemma2_caps": (
        "Gemma2Config",
        {"sliding_window": 4, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5},
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 4, "query_pre_attn_scalar": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "kimi_k2": ("kimi_k2", _DEEPSEEK),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 4, "state_size": 4, "n_groups": 1, "chunk_size": 8, "expand": 2},
    ),
    # Longer than the sequences that a model is tried with.
    "mistral_window": ("MistralConfig", {"sliding_window": 12}),
    "olmo3": ("Olmo3Config", {"sliding_window": 4}),
    "phi3_longrope": ("Phi3Config", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 8}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_next": ("Qwen3NextConfig", {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 12}),
    "stablelm": ("StableLmConfig", {}),
}
"""Families whose sequences go through the model in batches of like length."""

FAMILIES = {**PACKED, **FOLDED}


def family(name: str, *, vocab: int = VOCAB, seed: int = 3) -> PreTrainedModel:
    """A model of the family, with weights so large that every layer matters.

    It is in float64, or in float32 where it has experts: torch multiplies no groups of float64.
    """
    kind, changes = FAMILIES[name]
    of_type = partial(AutoConfig.for_model, kind)
    make: Callable[..., transformers.PreTrainedConfig] = getattr(transformers, kind, of_type)
    config = make(**({} if "n_embd" in changes else SHAPE) | changes | {"vocab_size": vocab})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if float(parameter.detach().std()) == 0.0 or parameter.numel() == 1:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
        else:
            nn.init.normal_(parameter, std=0.3)
    has_experts = any("experts" in key for key, _ in model.named_parameters())
    return model.to(torch.float32 if has_experts else torch.float64).eval()
