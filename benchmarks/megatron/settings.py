"""The workloads of `python -m benchmarks megatron`. Frozen: they change only with docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

STEP_TARGET = 0.85
PUBLISH_TARGET = 1.5


@dataclass(frozen=True, slots=True)
class BatchWorkload:
    """Samples of one batch, by their lengths (tokens). target: the share of the torch trainer's speed."""

    name: str
    lengths: tuple[int, ...]
    target: float | None = STEP_TARGET


SHORT = BatchWorkload("very short", tuple(np.random.default_rng(0).integers(8, 17, 84).tolist()), target=None)
"""An adverse case: 84 sequences of nine lengths in a row of 1,024 tokens."""

WORKLOADS = (
    BatchWorkload("four of 256", (256,) * 4),
    BatchWorkload("ragged", (17, 256, 96, 198, 64, 33, 141, 219)),
    SHORT,
)


def ten_million() -> PreTrainedModel:
    """A Qwen3 with 10.7 million parameters that all layouts of two ranks divide, random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096,
            hidden_size=320,
            intermediate_size=960,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def small_even() -> PreTrainedModel:
    """Nearly the shape of SmolLM2-135M, with heads that two ranks can share (137 million), random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """row_tokens: of a micro-batch; layout_row_tokens: the same for `layouts`."""

    trained: Callable[[], PreTrainedModel] = ten_million
    published: Callable[[], PreTrainedModel] = small_even
    workloads: tuple[BatchWorkload, ...] = WORKLOADS
    row_tokens: int = 1024
    layout_row_tokens: int = 256
    repeats: int = 9


SETTINGS = MegatronSettings()
"""Frozen."""
