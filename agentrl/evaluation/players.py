"""The agents of an eval-only run: over a model that is loaded here, or over a chat endpoint."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.env import EnvFactory
from agentrl.envs import AnyEnv, BaseEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.extras import TRAINING, require
from agentrl.protocols import Agent
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.chat.agent import ChatAgent
from agentrl.rollout.chat.config import DEFAULT_KEY_ENV, EndpointConfig
from agentrl.rollout.chat.endpoint import ChatEndpoint
from agentrl.rollout.chat.settings import ChatSettings, Prices

_CONCURRENCY = 256


class Players(NamedTuple):
    """Makes an agent for every episode. concurrency: episodes at once."""

    make_agent: Callable[[], Agent]
    concurrency: int


@asynccontextmanager
async def model_players(
    directory: str, config: EvalConfig, env: BaseEnv, *, on_event: Callable[[str], None]
) -> AsyncIterator[Players]:
    """Agents over a Hugging Face model directory, in the environment's dialect or the configured one.

    on_event: called with a message whenever a server starts or ends.

    Raises:
        UserError: the model cannot be loaded, or does not support the dialect; a server does not start.
    """
    # These load torch, which an endpoint does not need.
    require("opening a model", *TRAINING)
    from agentrl.assembly.model import threads_for
    from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine, build_renderer, dialect_of
    from agentrl.checkpoints.source import open_source

    source = open_source(directory)
    renderer = build_renderer(source, dialect_of(env, config.rendering), config.rendering)
    sampling = SamplingSettings(temperature=config.eval.temperature)
    with _engine_folder(config) as folder:
        threads = threads_for(source.config, config.eval.num_threads)
        setup = EngineSetup(folder, on_event, trains=False, threads=threads)
        engine = await build_engine(source, config.engine, env.limits, setup)
        try:
            yield Players(agent_factory(engine, renderer, sampling), _CONCURRENCY)
        finally:
            await engine.close()


@asynccontextmanager
async def local_models(config: EvalConfig, on_event: Callable[[str], None]) -> AsyncIterator[Addresses]:
    """Serve the models of `sglang_models` next to the scored one; yields their addresses."""
    if not config.engine.sglang_models:
        yield {}
        return
    require("serving models next to the scored one", *TRAINING)
    from agentrl.assembly.fleet import served_models

    with _engine_folder(config) as folder:
        async with served_models(config.engine, folder, on_event) as addresses:
            yield addresses


@asynccontextmanager
async def endpoint_players(config: EvalConfig, env: BaseEnv) -> AsyncIterator[Players]:
    """Agents over a chat endpoint, after one turn as a check.

    Raises:
        ConfigError: the endpoint cannot be reached, or refuses the key, the model or the request.
    """
    endpoint, section = _endpoint(config.openai), config.openai
    settings = ChatSettings(
        model=section.openai_model or "",
        temperature=config.eval.temperature,
        max_tokens=section.openai_max_tokens,
        reasoning=section.openai_reasoning,
        body=section.openai_body,
        omit=section.openai_omit,
        prices=_prices(section),
    )
    async with endpoint.connected() as connection:
        await connection.check(settings, env.tool_schemas)
        yield Players(partial(ChatAgent, connection, settings), section.openai_concurrency)


@contextmanager
def _engine_folder(config: EvalConfig) -> Iterator[Path]:
    """The folder for the logs of servers: below output_dir, or a temporary one."""
    with TemporaryDirectory(prefix="agentrl-eval-") as temporary:
        yield Path(config.eval.output_dir or temporary) / "engine"


def with_limits(make_env: EnvFactory, *, max_tokens: int | None) -> EnvFactory:
    """The same environments with this limit of tokens; None = no limit."""

    def make() -> AnyEnv:
        env = make_env()
        env.limits = replace(env.limits, max_tokens=max_tokens)
        return env

    return make


def _endpoint(section: EndpointConfig) -> ChatEndpoint:
    name = section.openai_key_env
    key = os.environ.get(name, "").strip() or None
    if key is None and name != DEFAULT_KEY_ENV:
        raise ConfigError(f"The environment variable {name} is not set; export it, or mend openai_key_env.")
    return ChatEndpoint(
        url=section.openai_url or "",
        key=key,
        key_env=name,
        timeout_s=section.openai_timeout_s,
        attempts=section.openai_attempts,
        max_requests=section.openai_concurrency,
    )


def _prices(section: EndpointConfig) -> Prices | None:
    if section.price_prompt is None or section.price_completion is None:
        return None
    cached = section.price_prompt if section.price_cached is None else section.price_cached
    return Prices(section.price_prompt, section.price_completion, cached)
