"""From names to frozen agents: scripts, chat endpoints, model directories."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from agentrl.assembly.addresses import Addresses, with_addresses
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.engine.config import EngineConfig
from agentrl.envs import AnyEnv, MultiAgentEnv
from agentrl.envs.config import SCRIPT
from agentrl.envs.opponents import Opponent, check_opponents, scripted
from agentrl.errors import ConfigError
from agentrl.rendering.config import RenderingConfig
from agentrl.rollout.agent import SamplingSettings
from agentrl.runtime.extras import TRAINING, require
from agentrl.types import Task
from agentrl.types.seams import Agent


class OpponentSetup(NamedTuple):
    """How opponents from model directories decode.

    folder: for the output of their processes; None = they decode in this one. rendering: of their turns.
    """

    rendering: RenderingConfig
    folder: Path | None = None


@asynccontextmanager
async def opened_opponents(
    chosen: Mapping[str, str], env: AnyEnv, addresses: Addresses, setup: OpponentSetup
) -> AsyncIterator[dict[str, Opponent]]:
    """The opponents that play the agents that are not trained, by name; they are closed with the block.

    Agents that are a part of the world have their scripts, where nothing else is chosen.

    addresses: of models that are served, by name; they take the place of "sglang_models.NAME".

    Raises:
        UserError: the environment has no such agent, or none is left for the policy; an endpoint's address is
            invalid; a model cannot be opened, or has no form for the dialect.
    """
    if isinstance(env, MultiAgentEnv):
        chosen = {**dict.fromkeys(env.scripted_agents, SCRIPT), **chosen}
    check_opponents(env, chosen)
    sources = {name: str(source) for name, source in with_addresses(chosen, addresses).items()}
    async with AsyncExitStack() as stack:
        yield {name: await _opened(stack, name, source, env, setup) for name, source in sources.items()}


async def _opened(
    stack: AsyncExitStack, name: str, source: str, env: AnyEnv, setup: OpponentSetup
) -> Opponent:
    if source == SCRIPT:
        return scripted
    if source.startswith(("http://", "https://")):
        return await _at_endpoint(stack, source)
    if Path(source).is_dir():
        folder = None if setup.folder is None else setup.folder / name
        return await _of_directory(stack, source, env, setup._replace(folder=folder))
    raise ConfigError(
        f"opponents: {name} = `{source}` is neither `script`, nor an address such as "
        "http://127.0.0.1:30000/v1, nor a model directory that exists; name one of these."
    )


async def _at_endpoint(stack: AsyncExitStack, url: str) -> Opponent:
    connection = await stack.enter_async_context(ChatEndpoint(url=url).connected())
    settings = ChatSettings(model="default")

    def opponent(env: MultiAgentEnv, task: Task, agent: str, seed: int) -> Agent:
        del env, task, agent, seed
        return ChatAgent(connection, settings)

    return opponent


async def _of_directory(stack: AsyncExitStack, directory: str, env: AnyEnv, setup: OpponentSetup) -> Opponent:
    require("an opponent from a model directory", *TRAINING)
    from agentrl.assembly.model import threads_for
    from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine, build_renderer, dialect_of
    from agentrl.engine.embedded.process import EngineProcess
    from agentrl.weights.hf.source import open_source

    source = open_source(directory)
    renderer = build_renderer(source, dialect_of(env, setup.rendering), setup.rendering)
    process = None
    if setup.folder is not None:
        process = EngineProcess(setup.folder, f"opponent {source.directory.name}")
        stack.callback(process.end)
    threads = threads_for(source.config, None)
    engine_setup = EngineSetup(
        setup.folder or Path(), _ignore_event, trains=False, process=process, threads=threads
    )
    engine = await build_engine(source, EngineConfig(), env.limits, engine_setup)
    stack.push_async_callback(engine.close)
    make_agent = agent_factory(engine, renderer, SamplingSettings())

    def opponent(env: MultiAgentEnv, task: Task, agent: str, seed: int) -> Agent:
        del env, task, agent, seed
        return make_agent()

    return opponent


def _ignore_event(event: str) -> None:
    del event
