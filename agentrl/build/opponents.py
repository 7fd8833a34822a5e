"""From names to frozen agents: scripts, chat endpoints, models that are opened here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentrl.build.addresses import Addresses, with_addresses
from agentrl.envs import AnyEnv, MultiAgentEnv
from agentrl.envs.config import SCRIPT
from agentrl.envs.opponents import Opponent, check_opponents, scripted
from agentrl.errors import ConfigError
from agentrl.extras import TRAINING, require
from agentrl.protocols import Agent
from agentrl.rendering.config import RenderingConfig
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.rollout.chat.agent import ChatAgent
from agentrl.rollout.chat.endpoint import ChatEndpoint
from agentrl.rollout.chat.settings import ChatSettings
from agentrl.types import Task

_MAX_SLOTS = 256


@asynccontextmanager
async def opened_opponents(
    chosen: Mapping[str, str], env: AnyEnv, rendering: RenderingConfig, addresses: Addresses
) -> AsyncIterator[dict[str, Opponent]]:
    """What plays the agents that are not trained, by name; it is closed with the block.

    addresses: of models that are served, by name; they take the place of "sglang_models.NAME".

    Raises:
        UserError: the environment has no such agent, or none is left for the policy; an endpoint's address is
            none; a model cannot be opened, or has no form for the dialect.
    """
    check_opponents(env, chosen)
    places = {name: str(place) for name, place in with_addresses(chosen, addresses).items()}
    async with AsyncExitStack() as stack:
        yield {name: await _opened(stack, name, place, env, rendering) for name, place in places.items()}


async def _opened(
    stack: AsyncExitStack, name: str, place: str, env: AnyEnv, rendering: RenderingConfig
) -> Opponent:
    if place == SCRIPT:
        return scripted
    if place.startswith(("http://", "https://")):
        return await _at_endpoint(stack, place)
    if Path(place).is_dir():
        return await _of_directory(stack, place, env, rendering)
    raise ConfigError(
        f"opponents: {name} = `{place}` is neither `script`, nor an address such as "
        "http://127.0.0.1:30000/v1, nor a model directory that exists; name one of these."
    )


async def _at_endpoint(stack: AsyncExitStack, url: str) -> Opponent:
    connection = await stack.enter_async_context(ChatEndpoint(url=url).connected())
    settings = ChatSettings(model="default")

    def opponent(env: MultiAgentEnv, task: Task, agent: str, seed: int) -> Agent:
        del env, task, agent, seed
        return ChatAgent(connection, settings)

    return opponent


async def _of_directory(
    stack: AsyncExitStack, directory: str, env: AnyEnv, rendering: RenderingConfig
) -> Opponent:
    require("an opponent from a model directory", *TRAINING)
    from agentrl.build.policy import build_renderer, dialect_of
    from agentrl.checkpoints.source import open_source
    from agentrl.engine.embedded import EmbeddedEngine

    source = open_source(directory)
    renderer = build_renderer(source, dialect_of(env, rendering), rendering)
    engine = EmbeddedEngine.from_pretrained(
        source.directory, max_slots=_MAX_SLOTS, max_context_len=env.limits.max_tokens, decode=source.decode
    )
    stack.push_async_callback(engine.close)

    def opponent(env: MultiAgentEnv, task: Task, agent: str, seed: int) -> Agent:
        del env, task, agent, seed
        return TokenAgent(engine, renderer, SamplingSettings())

    return opponent
