"""From the configuration to the policy's parts: engine, renderer, agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from agentrl.assembly.fleet import FleetPlan, ServedAdapters
from agentrl.assembly.memory import check_machine, embedded_memory
from agentrl.engine.config import EngineConfig
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.architecture import context_of, read_architecture
from agentrl.engine.embedded.engine import DEFAULT_CONTEXT
from agentrl.engine.embedded.messages import Open
from agentrl.engine.embedded.process import EngineProcess, ProcessEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.launch import Launcher, Value
from agentrl.envs import BaseEnv, Chat, Dialect, Tags
from agentrl.envs.dialect import tags_of
from agentrl.errors import ConfigError, UserError
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.config import RenderingConfig
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template_facts import with_arguments
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Limits
from agentrl.types.seams import Agent, Engine, Policy, Renderer, Stops
from agentrl.weights.codec import torch_dtype
from agentrl.weights.hf.fresh import draw_in_subprocess, draw_weights
from agentrl.weights.hf.source import ModelSource


class EngineSetup(NamedTuple):
    """How an engine is started. folder: for the files of servers.

    on_event: called with a sentence when a server starts or ends.

    trains: whether the run sends its engine new weights. releases: whether its memory is released between two
    batches. process, threads: the embedded engine's process, and its threads (count); without a process it
    decodes in this one. max_in_flight, arguments, dtype, launcher, title, adapters: see
    `FleetPlan`.
    """

    folder: Path
    on_event: Callable[[str], None]
    trains: bool = True
    releases: bool = False
    process: EngineProcess | None = None
    threads: int = 1
    max_in_flight: int | None = None
    arguments: Mapping[str, Value] = MappingProxyType({})
    dtype: str = "float32"
    launcher: Launcher | None = None
    title: str = ""
    adapters: ServedAdapters | None = None


async def build_engine(
    source: ModelSource, config: EngineConfig, limits: Limits, setup: EngineSetup
) -> Engine:
    """An engine with the weights of the model's directory, for episodes as long as `limits` allows.

    With engine = sglang: servers that are started now and load that directory, or those at sglang_url. In an
    eval-only run the latter serve weights of their own; a run that trains sends them the model's.

    Raises:
        ModelLoadError: the engine cannot decode the model.
        EngineDiedError: the engine's process has ended.
        ConfigError: no server answers at sglang_url, or it does not accept weights; SGLang is not installed,
            has no such argument, or does not start; the slots take more memory than this machine has.
    """
    if config.engine == "sglang":
        await asyncio.to_thread(draw_in_subprocess, source)
        if isinstance(config.sglang_url, str) and not setup.trains:
            return _policy_at(config.sglang_url, source, config)
        plan = _fleet_of(source, config, setup)
        return await (plan.join(trains=setup.trains) if config.addresses else plan.start())
    length, deterministic = config.max_context_len or limits.max_tokens, config.enable_deterministic_inference
    check_cache(source.config, config.max_slots, length, torch_dtype(config.engine_dtype))
    if read_architecture(source.config) is None:
        setup.on_event(
            f"the embedded engine decodes `{source.config.model_type}` by transformers' own code: exact, and "
            "slower than Llama, Qwen2 and Qwen3; on a GPU choose engine = sglang."
        )
    if setup.process is not None:
        directory = str(source.directory.resolve())
        model = Open(directory, config.max_slots, length, deterministic, setup.threads, source.seed)
        return await ProcessEngine.opened(setup.process, model._replace(dtype=config.engine_dtype))
    torch.set_num_threads(setup.threads)
    if source.seed is not None:
        draw_weights(source.directory, source.seed)
    return EmbeddedEngine.from_pretrained(
        source.directory,
        max_slots=config.max_slots,
        max_context_len=length,
        decode=source.decode,
        dtype=torch_dtype(config.engine_dtype),
        deterministic=deterministic,
    )


def _fleet_of(source: ModelSource, config: EngineConfig, setup: EngineSetup) -> FleetPlan:
    return FleetPlan(
        # Servers have other working directories.
        model=source.directory.absolute(),
        config=config,
        folder=setup.folder,
        vocab_size=source.vocab_size,
        decode=source.decode,
        on_event=setup.on_event,
        releases=setup.releases,
        max_in_flight=setup.max_in_flight,
        arguments=setup.arguments,
        dtype=setup.dtype,
        launcher=setup.launcher,
        adapters=setup.adapters,
        title=setup.title,
    )


def _policy_at(url: str, source: ModelSource, config: EngineConfig) -> SGLangPolicy:
    """The policy of servers that run already, and serve weights of their own."""
    return SGLangPolicy(
        url,
        max_concurrency=config.max_slots,
        adaptive=config.adaptive_concurrency,
        vocab_size=source.vocab_size,
        decode=source.decode,
    )


def check_cache(
    model: PreTrainedConfig, max_slots: int, context_len: int | None, dtype: torch.dtype = torch.float32
) -> None:
    """Check that the embedded engine's weights and cache are no more than this machine has.

    context_len: tokens of a slot; None = the engine's own number. dtype: of both.

    Raises:
        ConfigError: they are more.
    """
    length = min(context_len or DEFAULT_CONTEXT, context_of(model))
    check_machine(
        f"the embedded engine with max_slots = {max_slots:,}, each of {length:,} tokens,",
        embedded_memory(model, max_slots, length, dtype),
        "lower max_slots or max_context_len, or take a smaller model",
    )


def dialect_of(env: BaseEnv, config: RenderingConfig) -> Dialect:
    """The form of turns: the configured dialect, or the environment's own.

    Raises:
        UserError: a tool has the name of a tag of the configured dialect.
    """
    if config.dialect == "chat":
        return env.dialect if isinstance(env.dialect, Chat) else Chat()
    if config.dialect == "own":
        return env.dialect
    tags = tags_of(env.dialect)
    for tool in env.tool_schemas:
        if tool.name in (tags.result, tags.answer):
            raise UserError(
                f"{env.id}: the tool `{tool.name}` is named like a tag of the inline dialect; rename it, or "
                "train with dialect = chat."
            )
    return tags


def build_renderer(source: ModelSource, dialect: Dialect, config: RenderingConfig) -> Renderer:
    """The renderer of a dialect in the model's tokens.

    Raises:
        UserError: the model's tokenizer does not support the configured chat format.
        ConfigError: it has no such token, or no template for the arguments.
    """
    renderer: TokenRenderer
    tokenizer = with_arguments(source.tokenizer, config.apply_chat_template_kwargs)
    if isinstance(dialect, Tags):
        renderer = InlineRenderer(tokenizer, dialect)
    else:
        renderer = chat_renderer(tokenizer, config.chat_format)
    unknown = [number for number in config.rollout_stop_token_ids if number >= len(source.tokenizer)]
    if unknown:
        raise ConfigError(
            f"rollout_stop_token_ids has {unknown[0]}, and the tokenizer has {len(source.tokenizer)} tokens; "
            "name ids of its own."
        )
    own = dialect.stop if isinstance(dialect, Chat) else ()
    renderer.more_stops = Stops((*own, *config.rollout_stop), config.rollout_stop_token_ids)
    return renderer


def agent_factory(policy: Policy, renderer: Renderer, sampling: SamplingSettings) -> Callable[[], Agent]:
    """A function that makes a fresh token agent for every episode."""
    bounded = renderer.bounded if isinstance(renderer, TokenRenderer) else None
    return lambda: TokenAgent(policy, renderer, sampling, bounded)
