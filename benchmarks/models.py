"""Models with random weights, and their folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.weights.hf.export import save_model


def tiny_model(vocab_size: int = 200) -> PreTrainedModel:
    """The quickstart's shape, 0.66M parameters."""
    return _qwen3(vocab_size, layers=3, width=128, inner=384, heads=2, groups=2)


def windowed() -> PreTrainedModel:
    """The quickstart's shape as a Gemma 2, which the embedded engine has no decoder of its own for."""
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=200,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            sliding_window=64,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def ten_million() -> PreTrainedModel:
    """A Qwen3 with 10.7 million parameters."""
    return _qwen3(4096, layers=8, width=320, inner=960, heads=4, groups=2)


def small_model() -> PreTrainedModel:
    """The shape of SmolLM2-135M."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _qwen3(
    vocab_size: int, *, layers: int, width: int, inner: int, heads: int, groups: int
) -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def seeded(make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with reproducible random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make()
    network.eval()
    # Module.to is wrapped by transformers in a way that hides its signature from type checkers.
    nn.Module.to(network, dtype)
    return network


def save(network: PreTrainedModel, folder: Path) -> Path:
    """Write a model directory, with the tokenizer of `tokenizer_of`."""
    save_model(network, tokenizer_of(network), str(folder))
    return folder


def tokenizer_of(network: PreTrainedModel) -> PreTrainedTokenizerFast:
    """One word for each token of a model, and no end of text."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size(network))}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    longest = int(network.config.max_position_embeddings)
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=longest)


def vocab_size(network: PreTrainedModel) -> int:
    """The size of a model's vocabulary."""
    return int(network.config.vocab_size)
