"""The decoder's parameters of a model, read from its Hugging Face configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Architecture:
    """Sizes and switches of a Llama-like decoder.

    qkv_bias, out_bias: of the projections to queries, keys and values, and of the one back.
    inv_freq: float32 [head_dim / 2], radians per position. rope_scale multiplies cos and sin.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    inv_freq: Tensor
    rope_scale: float

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, by its Hugging Face name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        linears = {
            "self_attn.q_proj": ((self.query_size, hidden), self.qkv_bias),
            "self_attn.k_proj": ((self.kv_size, hidden), self.qkv_bias),
            "self_attn.v_proj": ((self.kv_size, hidden), self.qkv_bias),
            "self_attn.o_proj": ((hidden, self.query_size), self.out_bias),
            "mlp.gate_proj": ((wide, hidden), self.mlp_bias),
            "mlp.up_proj": ((wide, hidden), self.mlp_bias),
            "mlp.down_proj": ((hidden, wide), self.mlp_bias),
        }
        layer_shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (shape, biased) in linears.items():
            layer_shapes[f"{name}.weight"] = shape
            if biased:
                layer_shapes[f"{name}.bias"] = shape[:1]
        if self.qk_norm:
            layer_shapes |= {f"self_attn.{which}_norm.weight": (self.head_dim,) for which in "qk"}
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def read_architecture(config: PreTrainedConfig) -> Architecture | None:
    """Read the configuration of a Llama, a Qwen2 (Qwen2.5 is one, too) or a Qwen3.

    None = another architecture, or a variant that the decoder does not implement.
    """
    if not isinstance(config, LlamaConfig | Qwen2Config | Qwen3Config) or not _is_plain(config):
        return None
    heads = config.num_attention_heads
    rope = _rotary_embedding(config)
    attention_bias = not isinstance(config, Qwen2Config) and bool(config.attention_bias)
    return Architecture(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        # Qwen2Config has no such field, and takes it all the same.
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or isinstance(config, Qwen2Config),
        out_bias=attention_bias,
        mlp_bias=isinstance(config, LlamaConfig) and bool(config.mlp_bias),
        qk_norm=isinstance(config, Qwen3Config),
        max_position_embeddings=config.max_position_embeddings,
        inv_freq=rope.inv_freq.to(torch.float32).cpu(),
        rope_scale=float(rope.attention_scaling),
    )


def context_of(config: PreTrainedConfig) -> int:
    """The most tokens of a sequence; a model that knows no positions takes any number."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT)


def eos_of(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a completion, by the model's generation config, else by its config."""
    eos_ids = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    if eos_ids is None:
        return ()
    return (eos_ids,) if isinstance(eos_ids, int) else tuple(eos_ids)


def _rotary_embedding(
    config: LlamaConfig | Qwen2Config | Qwen3Config,
) -> LlamaRotaryEmbedding | Qwen2RotaryEmbedding | Qwen3RotaryEmbedding:
    if isinstance(config, Qwen3Config):
        return Qwen3RotaryEmbedding(config)
    return Qwen2RotaryEmbedding(config) if isinstance(config, Qwen2Config) else LlamaRotaryEmbedding(config)


def _is_plain(config: LlamaConfig | Qwen2Config | Qwen3Config) -> bool:
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    # Windows that the configuration switches on for no layer change nothing.
    has_windows = not isinstance(config, LlamaConfig) and "sliding_attention" in (config.layer_types or ())
    return kind in _STATIC_ROPE and config.hidden_act == "silu" and not has_windows
