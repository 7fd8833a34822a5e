"""The number of floating-point operations of a decoder's forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PretrainedConfig


def forward_flops(
    config: PretrainedConfig, lengths: Sequence[int], predicted: int, *, causal: bool = True
) -> float:
    """The operations of a batch of sequences: matrices of all layers, attention, and the head.

    A multiplication and an addition count as two. predicted: tokens that go through the head. causal: a token
    attends to itself and to earlier tokens; else to all. A backward pass needs twice as many operations.
    """
    hidden, intermediate = int(config.hidden_size), int(config.intermediate_size)
    heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    attention = hidden * width * (2 * heads + 2 * groups)
    matrices = int(config.num_hidden_layers) * (attention + 3 * hidden * intermediate)
    num_pairs = sum(length * (length + 1) / 2 if causal else length**2 for length in lengths)
    attention_scores = int(config.num_hidden_layers) * 2 * heads * width * num_pairs
    return 2.0 * (matrices * sum(lengths) + attention_scores + predicted * hidden * int(config.vocab_size))
