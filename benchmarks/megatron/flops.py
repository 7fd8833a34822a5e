"""How many floating-point operations a decoder's forward pass needs, whatever computes it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig

H100_BF16 = 989e12
"""Dense bf16 operations a second of an H100 or H200, as their data sheets have it."""


def forward_flops(
    config: PretrainedConfig, lengths: Sequence[int], predicted: int, *, causal: bool = True
) -> float:
    """Of a batch of sequences: matrices of all layers, attention, and the head over the vocabulary.

    A multiplication and an addition are two. predicted: tokens that go through the head. causal: a token
    looks at itself and at those before it; without, at all. A backward pass needs twice as many.
    """
    hidden, wide = int(config.hidden_size), int(config.intermediate_size)
    heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    attention = hidden * width * (2 * heads + 2 * groups)
    matrices = int(config.num_hidden_layers) * (attention + 3 * hidden * wide)
    looks = sum(length * (length + 1) / 2 if causal else length**2 for length in lengths)
    looked_at = int(config.num_hidden_layers) * 2 * heads * width * looks
    return 2.0 * (matrices * sum(lengths) + looked_at + predicted * hidden * int(config.vocab_size))
