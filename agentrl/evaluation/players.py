"""The agents of an eval-only run: over a model that is loaded here, or over a chat endpoint."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from agentrl.assembly.addresses import Addresses
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.config import DEFAULT_KEY_ENV, EndpointConfig
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings, Prices
from agentrl.envs import BaseEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.rollout.agent import SamplingSettings
from agentrl.runtime.extras import TRAINING, require
from agentrl.runtime.temporary import temporary_folder
from agentrl.types import Limits
from agentrl.types.seams import Agent, ToolSchema

if TYPE_CHECKING:
    from agentrl.assembly.cluster import RunCluster

_CONCURRENCY = 256


class EvalPlayers(NamedTuple):
    """Makes an agent for every episode. concurrency: episodes at once."""

    make_agent: Callable[[], Agent]
    concurrency: int


PlayersOf: TypeAlias = Callable[[EvalConfig, BaseEnv], EvalPlayers]
"""The players of one opened model in an environment, with the sampling and the dialect of a configuration."""


@asynccontextmanager
async def model_players(
    directory: str,
    config: EvalConfig,
    limits: Limits,
    *,
    on_event: Callable[[str], None],
    cluster: RunCluster | None = None,
) -> AsyncIterator[PlayersOf]:
    """Agents over a Hugging Face model directory, in an environment's dialect or the configured one.

    limits: of the longest episodes. on_event: called with a message whenever a server starts or ends.
    cluster: has a place for each server; None = they run on this machine.

    Raises:
        UserError: the model cannot be loaded, or does not support the dialect; a server does not start.
    """
    # These load torch, which an endpoint does not need.
    require("opening a model", *TRAINING)
    from agentrl.assembly.cluster import POLICY
    from agentrl.assembly.model import threads_for
    from agentrl.assembly.places import local_servers
    from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine, build_renderer, dialect_of
    from agentrl.weights.hf.source import open_source

    source = open_source(directory)
    with _engine_folder(config) as folder:
        threads = threads_for(source.config, config.eval.num_threads)
        launcher = (cluster or local_servers(config.engine, config.cluster)).launcher(POLICY)
        setup = EngineSetup(folder, on_event, trains=False, threads=threads, launcher=launcher)
        setup = setup._replace(max_in_flight=config.engine.max_slots)
        engine = await build_engine(source, config.engine, limits, setup)

        def players_of(config: EvalConfig, env: BaseEnv) -> EvalPlayers:
            renderer = build_renderer(source, dialect_of(env, config.rendering), config.rendering)
            section = config.eval
            sampling = SamplingSettings(
                temperature=section.temperature,
                top_p=1.0 if section.eval_top_p is None else section.eval_top_p,
                top_k=section.eval_top_k or 0,
                max_response_len=section.eval_max_response_len,
            )
            return EvalPlayers(agent_factory(engine, renderer, sampling), _CONCURRENCY)

        try:
            yield players_of
        finally:
            await engine.close()


@asynccontextmanager
async def local_models(
    config: EvalConfig, on_event: Callable[[str], None], cluster: RunCluster | None = None
) -> AsyncIterator[Addresses]:
    """Serve the models of `sglang_models` next to the scored one; yields their addresses."""
    if not config.engine.sglang_models:
        yield {}
        return
    require("serving models next to the scored one", *TRAINING)
    from agentrl.assembly.fleet import served_models
    from agentrl.assembly.places import local_servers

    places = cluster or local_servers(config.engine, config.cluster)
    with _engine_folder(config) as folder:
        async with served_models(config.engine, folder, on_event, places) as addresses:
            yield addresses


@contextmanager
def eval_cluster(config: EvalConfig, env: str, folder: Path) -> Iterator[RunCluster | None]:
    """The places of all servers of an evaluation; None = they run on this machine, or there are none.

    folder: of the evaluation, for the logs of a Ray of its own.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers, or it has no room for the servers.
    """
    if config.cluster.cluster == "local":
        yield None
        return
    require("serving models", *TRAINING)
    from agentrl.assembly.cluster import servers_cluster

    metadata = {"evaluation": env, "folder": str(folder.absolute())}
    with servers_cluster(config.cluster, config.engine, folder, metadata) as cluster:
        yield cluster


@asynccontextmanager
async def endpoint_players(config: EvalConfig, tools: Sequence[ToolSchema]) -> AsyncIterator[PlayersOf]:
    """Agents over a chat endpoint, after one turn as a check. tools: offered in it.

    Raises:
        ConfigError: the endpoint cannot be reached, or refuses the key, the model or the request.
    """
    async with _endpoint(config.openai).connected() as connection:
        await connection.check(_chat_settings(config), tools)

        def players_of(config: EvalConfig, env: BaseEnv) -> EvalPlayers:
            del env
            make_agent = partial(ChatAgent, connection, _chat_settings(config))
            return EvalPlayers(make_agent, config.openai.openai_concurrency)

        yield players_of


def _chat_settings(config: EvalConfig) -> ChatSettings:
    section, sampling = config.openai, config.eval
    bounds = [n for n in (section.openai_max_tokens, sampling.eval_max_response_len) if n is not None]
    cuts = {"top_p": sampling.eval_top_p, "top_k": sampling.eval_top_k}
    chosen = {name: value for name, value in cuts.items() if value is not None}
    return ChatSettings(
        model=section.openai_model or "",
        temperature=sampling.temperature,
        max_tokens=min(bounds, default=None),
        reasoning=section.openai_reasoning,
        body={**chosen, **section.openai_body},
        omit=section.openai_omit,
        prices=_prices(section),
    )


@contextmanager
def _engine_folder(config: EvalConfig) -> Iterator[Path]:
    """The folder for the logs of servers: below output_dir, or a temporary one, where any is started."""
    starts_servers = config.engine.engine == "sglang" and config.engine.sglang_url is None
    if not (starts_servers or config.engine.sglang_models or config.engine.has_router):
        yield Path("engine")
        return
    with temporary_folder("servers") as temporary:
        yield Path(config.eval.output_dir or temporary) / "engine"


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
