"""The policies of a benchmark: scripts that need no model, and models behind an engine or an endpoint."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

from agentrl.envs import AnyEnv, MultiAgentEnv, Script
from agentrl.envs.check.arena import YieldingAgent
from agentrl.envs.check.policies import random_policy
from agentrl.envs.opponents import AgentsOf, Opponents, policy_agents, roles_of
from agentrl.evaluation.benchmark.suite import PolicyChoice
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.players import PlayersOf, endpoint_players, model_players
from agentrl.types import Limits, Task
from agentrl.types.seams import Agent

_SCRIPTED_AT_ONCE = 64

Player: TypeAlias = Callable[[AnyEnv, Task, str, int], Agent]
"""Creates the player of an agent, by name, of an environment in one episode; the number is its seed."""


class Playing(NamedTuple):
    """The agents of a policy in one environment. concurrency: episodes at once."""

    agents_of: AgentsOf
    concurrency: int


PlayingOf: TypeAlias = Callable[[EvalConfig, AnyEnv, Opponents], Playing]
"""An opened policy in an environment, with the settings of a cell; opponents play what it does not."""


@asynccontextmanager
async def opened(
    policy: PolicyChoice,
    config: EvalConfig,
    limits: Limits,
    example: AnyEnv,
    *,
    on_event: Callable[[str], None],
) -> AsyncIterator[PlayingOf]:
    """Open a policy for all its cells.

    config: has its settings. limits: of the longest episodes. example: an environment, whose tools are
    offered to an endpoint as a check. on_event: called with a message whenever a server starts or ends.

    Raises:
        UserError: the model cannot be loaded or reached, or a server does not start.
    """
    if policy.kind == "script":
        player = _PLAYERS[policy.target]
        yield lambda _config, _env, opponents: Playing(_cast(player, opponents), _SCRIPTED_AT_ONCE)
        return
    opening = (
        model_players(policy.target, config, limits, on_event=on_event)
        if policy.kind == "directory"
        else endpoint_players(config, example.tool_schemas)
    )
    async with opening as players_of:
        yield lambda config, env, opponents: _playing(players_of, config, env, opponents)


def _playing(players_of: PlayersOf, config: EvalConfig, env: AnyEnv, opponents: Opponents) -> Playing:
    players = players_of(config, env)
    return Playing(policy_agents(players.make_agent, opponents), players.concurrency)


def _cast(player: Player, opponents: Opponents) -> AgentsOf:
    """A player for each agent that no opponent plays."""

    def agents_of(env: AnyEnv, task: Task, seed: int) -> Agent | dict[str, Agent]:
        return roles_of(env, task, lambda name: player(env, task, name, seed), opponents, seed=seed)

    return agents_of


def expert(env: AnyEnv, task: Task, agent: str, seed: int) -> Agent:
    """The environment's own expert; where it has none, acting raises a UserError."""
    del seed
    if not isinstance(env, MultiAgentEnv):
        single = env
        return YieldingAgent(lambda _: single.expert(task))
    several = env
    return YieldingAgent(lambda prompt: several.expert(task, agent, prompt))


def null(env: AnyEnv, task: Task, agent: str, seed: int) -> Agent:
    """An agent that answers with nothing."""
    del env, task, agent, seed
    return YieldingAgent(_nothing())


def at_random(env: AnyEnv, task: Task, agent: str, seed: int) -> Agent:
    """An agent that calls tools with valid arguments, and answers with words of the task, at random."""
    return YieldingAgent(random_policy(env, task, random.Random(f"random/{agent}/{seed}")))


def _nothing() -> Script:
    yield from ()


_PLAYERS: dict[str, Player] = {"expert": expert, "null": null, "random": at_random}
