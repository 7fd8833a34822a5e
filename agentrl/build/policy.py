"""From the configuration to what plays: engine, renderer, agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from agentrl.build.fleet import FleetPlan
from agentrl.build.model import Model
from agentrl.engine.config import EngineConfig
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.envs import Chat, Dialect, Env, Tags
from agentrl.envs.dialect import tags_of
from agentrl.errors import UserError
from agentrl.protocols import Agent, Engine, Policy, Renderer
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.config import RenderingConfig
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.trainer.torch.checkpoint import save_model
from agentrl.types import Limits
from agentrl.weights import named_weights


class Place(NamedTuple):
    """Where servers are started. folder: for what they write. say: is told of those that come and go.

    model: where an eval-only run has its model from; None = a run that trains, and writes it into `folder`.
    """

    folder: Path
    say: Callable[[str], None]
    model: Path | None = None


async def build_engine(model: Model, config: EngineConfig, limits: Limits, place: Place) -> Engine:
    """An engine over a copy of the model's weights, with room for the episodes of `limits`.

    With engine = sglang: servers that are started now, or those at sglang_url. In an eval-only run these
    serve weights of their own, only the tokens are the model's; a run that trains sends them the model's.

    Raises:
        ModelLoadError: the engine does not decode this architecture.
        ConfigError: nobody is at sglang_url, or takes weights there; SGLang is not installed, knows no such
            argument, or does not come up.
    """
    vocab_size = int(model.network.config.get_text_config().to_dict()["vocab_size"])

    def decode(ids: Sequence[int]) -> str:
        return str(model.tokenizer.decode(list(ids), skip_special_tokens=False))

    if config.engine == "sglang":
        url = config.sglang_url
        if url is not None and place.model is not None:
            return SGLangPolicy(url, max_concurrency=config.max_slots, vocab_size=vocab_size, decode=decode)
        plan = FleetPlan(
            model=place.model or _written(model, place.folder / "model"),
            config=config,
            folder=place.folder,
            vocab_size=vocab_size,
            decode=decode,
            say=place.say,
        )
        return await (plan.start() if url is None else plan.join(url, named_weights(model.network)))
    return EmbeddedEngine.from_model(
        model.network,
        max_slots=config.max_slots,
        max_context_len=config.max_context_len or limits.max_tokens,
        decode=decode,
    )


def _written(model: Model, folder: Path) -> Path:
    save_model(model.network, model.tokenizer, str(folder))
    return folder


def dialect_of(env: Env, config: RenderingConfig) -> Dialect:
    """The form of turns: what the run asks for, or the environment's own.

    Raises:
        UserError: a tool is named like a tag of the dialect that was asked for.
    """
    if config.dialect == "chat":
        return Chat()
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


def build_renderer(model: Model, dialect: Dialect, config: RenderingConfig) -> Renderer:
    """The renderer of a dialect in the model's tokens.

    Raises:
        UserError: the model's tokenizer cannot speak the chat format that was asked for.
    """
    if isinstance(dialect, Tags):
        return InlineRenderer(model.tokenizer, dialect)
    return chat_renderer(model.tokenizer, config.chat_format)


def agent_factory(policy: Policy, renderer: Renderer, sampling: SamplingSettings) -> Callable[[], Agent]:
    """A function that makes a fresh token agent for every episode."""
    return lambda: TokenAgent(policy, renderer, sampling)
