"""The agents of an episode by name: frozen opponents for some, the policy for all others."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeAlias

from agentrl.envs.boundary import has_several_agents
from agentrl.envs.multi_agent import AnyEnv, MultiAgentEnv, check_agent
from agentrl.envs.play import Frozen
from agentrl.errors import UserError
from agentrl.types import AGENT, Task
from agentrl.types.seams import Agent

Opponent: TypeAlias = Callable[[MultiAgentEnv, Task, str, int], Agent]
"""Creates the player of an agent, by name, of an environment in one episode; the number is its seed."""

Opponents: TypeAlias = Mapping[str, Opponent]
"""Frozen agents by name: they are never trained."""


def scripted(env: MultiAgentEnv, task: Task, agent: str, seed: int) -> Agent:
    """The environment's own script, see `MultiAgentEnv.opponent`."""
    return env.scripted(task, agent, random.Random(f"opponent/{agent}/{seed}"))


AgentsOf: TypeAlias = Callable[[AnyEnv, Task, int], Agent | Mapping[str, Agent]]
"""Creates the agents of one episode, for `play`, of an environment and a task; the number is their seed."""


def policy_agents(make_agent: Callable[[], Agent], opponents: Opponents) -> AgentsOf:
    """Agents of the policy, one for each role that no opponent plays."""
    return lambda env, task, seed: agents_of(env, task, make_agent, opponents, seed=seed)


def agents_of(
    env: AnyEnv, task: Task, make_agent: Callable[[], Agent], opponents: Opponents, *, seed: int
) -> Agent | dict[str, Agent]:
    """The agents for `play`: one of the policy, or, of several agents, one for each by name."""
    return roles_of(env, task, lambda _: make_agent(), opponents, seed=seed)


def roles_of(
    env: AnyEnv, task: Task, player: Callable[[str], Agent], opponents: Opponents, *, seed: int
) -> Agent | dict[str, Agent]:
    """The agents for `play`, where the policy's player of an agent depends on its name."""
    if not has_several_agents(env):
        return player(AGENT)
    assert isinstance(env, MultiAgentEnv)
    return {
        name: Frozen(opponents[name](env, task, name, seed)) if name in opponents else player(name)
        for name in env.possible_agents
    }


def check_opponents(env: AnyEnv, opponents: Mapping[str, object]) -> None:
    """Check that opponents play agents of the environment, and at least one remains for the policy.

    Raises:
        UserError: they do not.
    """
    if not opponents:
        return
    if not isinstance(env, MultiAgentEnv):
        raise UserError(f"{env.id} has one agent, so nobody plays against it; leave out opponents.")
    for name in opponents:
        check_agent(env, name)
    if not set(env.possible_agents) - set(opponents):
        raise UserError(f"opponents play every agent of {env.id}; leave one out for the policy.")
