"""From the configuration to what plays: engine, renderer, agents."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.build.model import Model
from agentrl.engine.config import EngineConfig
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.envs import Env
from agentrl.protocols import Agent, Engine, Policy, Renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Limits


def build_engine(model: Model, config: EngineConfig, limits: Limits) -> Engine:
    """An engine over a copy of the model's weights, with room for the episodes of `limits`.

    Raises:
        ModelLoadError: the engine does not decode this architecture.
    """
    return EmbeddedEngine.from_model(
        model.network,
        max_slots=config.max_slots,
        max_context_len=config.max_context_len or limits.max_tokens,
        decode=lambda ids: str(model.tokenizer.decode(list(ids), skip_special_tokens=False)),
    )


def build_renderer(model: Model, env: Env) -> Renderer:
    """The renderer of the environment's dialect in the model's tokens."""
    return InlineRenderer(model.tokenizer, env.dialect)


def agent_factory(policy: Policy, renderer: Renderer, sampling: SamplingSettings) -> Callable[[], Agent]:
    """A function that makes a fresh token agent for every episode."""
    return lambda: TokenAgent(policy, renderer, sampling)
