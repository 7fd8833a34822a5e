"""From the configuration to a model and its tokenizer, in fp32, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.build.config import ModelSection
from agentrl.engine.embedded.loading import open_directory
from agentrl.envs import Env
from agentrl.envs.dialect import Dialect, Tags, closing, opening
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS, train_tokenizer

_SMALL_MODEL = 20_000_000


class Model(NamedTuple):
    """Weights and words of one policy."""

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build_model(section: ModelSection, env: Env, dialect: Dialect, *, seed: int) -> Model:
    """Open `hf_checkpoint`, or make a fresh model with a tokenizer for this environment.

    Raises:
        ModelLoadError: the directory is missing or does not hold a model.
    """
    if section.hf_checkpoint is not None:
        return open_model(section.hf_checkpoint)
    return fresh_model(section, env, dialect, seed=seed)


def open_model(directory: str) -> Model:
    """Load a Hugging Face model directory.

    Raises:
        ModelLoadError: the directory is missing or does not hold a model.
    """
    return Model(open_directory(directory, torch.float32), open_tokenizer(directory))


def open_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face model directory.

    Raises:
        ModelLoadError: it holds none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelLoadError(f"the tokenizer in {directory} cannot be loaded: {reason}") from error
    # Without its files transformers makes an empty one of the model's kind.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ModelLoadError(f"{directory} holds no tokenizer; copy tokenizer.json beside the model.")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def fresh_model(section: ModelSection, env: Env, dialect: Dialect, *, seed: int) -> Model:
    """A randomly initialised Qwen3, and a tokenizer trained on the environment's own text.

    The dialect's markup becomes single tokens, so that a turn ends with one token.

    Raises:
        ConfigError: vocab_size has no room for all bytes and tags.
    """
    special: Sequence[str] = CALL_MARKERS
    if isinstance(dialect, Tags):
        tags = dialect.names(schema.name for schema in env.tool_schemas)
        special = [form(tag) for tag in tags for form in (opening, closing)]
    try:
        tokenizer = train_tokenizer(env.corpus(), special_tokens=special, vocab_size=section.vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=section.hidden_size,
        intermediate_size=section.ffn_hidden_size,
        num_hidden_layers=section.num_layers,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.num_query_groups,
        head_dim=section.kv_channels,
        rope_parameters={"rope_type": "default", "rope_theta": section.rotary_base},
        tie_word_embeddings=True,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen3ForCausalLM(config)
    return Model(network, tokenizer)


def use_threads(network: PreTrainedModel, requested: int | None) -> None:
    """Tell torch how many threads to compute with; None chooses by the model's size."""
    small = sum(parameter.numel() for parameter in network.parameters()) < _SMALL_MODEL
    torch.set_num_threads(requested or (1 if small else os.cpu_count() or 1))
