"""From the configuration to the model's directory, config and tokenizer; weights are not loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, Qwen3Config

from agentrl.assembly.config import RunConfig
from agentrl.assembly.memory import FP32, MemoryNeed, check_machine
from agentrl.assembly.sections import ModelSection
from agentrl.envs import BaseEnv
from agentrl.envs.base import corpus_of
from agentrl.envs.dialect import Dialect, Tags, closing, opening
from agentrl.errors import ConfigError
from agentrl.rendering.fresh_tokenizer import CALL_MARKERS, train_tokenizer
from agentrl.types import ExpertLayers
from agentrl.weights.hf.fresh import draw_in_subprocess, draw_weights, write_untrained
from agentrl.weights.hf.routing import expert_sizes
from agentrl.weights.hf.source import ModelSource, open_source
from agentrl.weights.hf.tensors import num_parameters


def expert_layers_of(config: RunConfig, model: PreTrainedConfig) -> ExpertLayers | None:
    """The layers whose experts the engine returns; None = it returns none.

    Raises:
        ConfigError: the model has none, and they are to be returned or replayed.
    """
    sizes = expert_sizes(model)
    trainer = config.trainer
    is_meant = trainer.router_replay or config.returns_experts or trainer.has_router_losses
    if sizes is None and is_meant:
        raise ConfigError(
            "router_replay, return_routed_experts, moe_aux_loss_coeff and moe_z_loss_coeff are for a mixture "
            f"of experts, and a model of type `{model.model_type}` is none; leave them out."
        )
    return sizes.layers if sizes is not None and config.returns_experts else None


_SMALL_MODEL = 20_000_000


def model_source(
    section: ModelSection,
    env: BaseEnv | None,
    dialect: Dialect,
    *,
    seed: int,
    folder: Path,
    corpus: Iterable[str] | None = None,
) -> ModelSource:
    """The directory `hf_checkpoint`, or `folder`, which a new model for this environment is written into.

    The first process that opens a new model initializes its weights. env: None = without an environment.
    corpus: the text for its tokenizer; left out, the environment's own.

    Raises:
        ModelLoadError: the directory is missing or does not hold a model.
    """
    if section.hf_checkpoint is not None:
        return open_source(section.hf_checkpoint)
    return fresh_source(section, env, dialect, seed=seed, folder=folder, corpus=corpus)


def fresh_source(
    section: ModelSection,
    env: BaseEnv | None,
    dialect: Dialect,
    *,
    seed: int,
    folder: Path,
    corpus: Iterable[str] | None = None,
) -> ModelSource:
    """A randomly initialised Qwen3, and a tokenizer trained on the environment's own text or `corpus`, in
    `folder`.

    The dialect's markup becomes single tokens, so that a turn ends with one token.

    Raises:
        ConfigError: vocab_size is too small for all bytes and tags, or this machine for the weights.
    """
    special: Sequence[str] = CALL_MARKERS
    if isinstance(dialect, Tags):
        tags = dialect.names(schema.name for schema in (() if env is None else env.tool_schemas))
        special = [form(tag) for tag in tags for form in (opening, closing)]
    try:
        text = corpus_of(env) if corpus is None and env is not None else corpus or ()
        tokenizer = train_tokenizer(text, special_tokens=special, vocab_size=section.vocab_size)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    _check_weights(section, len(tokenizer))
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
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
    write_untrained(folder, config, tokenizer)
    return ModelSource(folder, config, tokenizer, seed)


def _check_weights(section: ModelSection, vocab_size: int) -> None:
    """Check that this machine can hold the weights, before anything of that size is made: transformers makes
    a list of the layers."""
    parameters = fresh_parameters(section, vocab_size)
    check_machine(
        f"a fresh model of {parameters:,} parameters (num_layers = {section.num_layers}, hidden_size = "
        f"{section.hidden_size}, ffn_hidden_size = {section.ffn_hidden_size})",
        MemoryNeed(weights=FP32 * parameters),
        "lower the largest of these",
    )


def fresh_parameters(section: ModelSection, vocab_size: int) -> int:
    """The parameters of a fresh model (count): a tied embedding, attention with norms of queries and keys,
    gated feed-forward blocks, and two norms for each layer."""
    hidden, head = section.hidden_size, section.kv_channels
    projections = 2 * hidden * head * (section.num_attention_heads + section.num_query_groups)
    layer = projections + 2 * head + 3 * hidden * section.ffn_hidden_size + 2 * hidden
    return vocab_size * hidden + section.num_layers * layer + hidden


def drawn(source: ModelSource, *, inline: bool) -> ModelSource:
    """The source with its weights on disk, where no engine opens it first. The call blocks.

    inline: initialize them in this process, in place of one that ends.

    Raises:
        ModelLoadError: they cannot be initialized, or written.
    """
    if source.seed is not None and inline:
        draw_weights(source.directory, source.seed)
    else:
        draw_in_subprocess(source)
    return replace(source, seed=None)


def threads_for(config: PreTrainedConfig, requested: int | None) -> int:
    """Threads of torch (count). requested: None = chosen by the model's size.

    Engine and trainer compute alternately, so each may use all cores.
    """
    small = num_parameters(config) < _SMALL_MODEL
    return requested or (1 if small else os.cpu_count() or 1)


def use_threads(config: PreTrainedConfig, requested: int | None) -> None:
    """Set the threads of torch in this process; see `threads_for`."""
    torch.set_num_threads(threads_for(config, requested))
