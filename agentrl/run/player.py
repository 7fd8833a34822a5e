"""A player of a run, in a process of its own: python -m agentrl.run.player FD (the child's end of a pipe).

It builds its environment, rewards and renderer by the run's configuration, as the driver does.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agentrl.activity import Activities
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.cluster import RunCluster
from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import run_env_factory
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.checkpoints.source import ModelSource, open_source
from agentrl.clocks import Waits
from agentrl.envs.registry import EnvSpec, find, register
from agentrl.protocols import Policy
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import main
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.local import LocalPlayers
from agentrl.rollout.players.players import Players
from agentrl.run.parts import Records, World, filters_of, player_of, scoring_of
from agentrl.trainer.launch.messages import pickled_plan


class _Plan(NamedTuple):
    """What a player is built from. directory: of the model, for its tokenizer. env: the environment that the
    driver has under that name. folder: for the output of opponents.
    """

    config: RunConfig
    directory: Path
    env: EnvSpec
    addresses: Mapping[str, str]
    folder: Path


def players_of(
    config: RunConfig,
    source: ModelSource,
    engine: Policy | None,
    records: Records,
    addresses: Addresses,
    cluster: RunCluster | None,
) -> Players | None:
    """The players of a run; None = the driver plays, or nothing plays.

    cluster: has an allocation for each; None = they are child processes.

    Raises:
        ConfigError: no other process can import the environment.
    """
    if engine is None or not config.num_players:
        return None
    folder = records.folder.players
    plan = _Plan(config, source.directory.absolute(), find(config.env.env), {**addresses}, folder)
    activities: Activities = records.monitor.activities
    started = PlayerPlan(__spec__.name, pickled_plan(plan), folder)
    launcher = LocalPlayers(config.num_players) if cluster is None else cluster.players
    return Players(launcher, started, engine, activities, records.console.line)


@asynccontextmanager
async def opened_player(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[GroupPlayer]:
    """The player of a plan.

    Raises:
        UserError: the environment or a function by path cannot be imported here, or an opponent not opened.
    """
    config, directory, spec, addresses, folder = _Plan(*pickle.loads(plan))
    if ":" not in spec.id:
        register(spec.id, spec.env_class, **spec.kwargs)
    make_env = run_env_factory(config, addresses)
    env = make_env()
    scorer, play = await scoring_of(config, make_env, None, addresses)
    renderer = build_renderer(open_source(directory), dialect_of(env, config.rendering), config.rendering)
    world = World(make_env, scorer, renderer, play_episode=play)
    setup = OpponentSetup(config.rendering, folder / "opponents")
    async with opened_opponents(config.env.opponents, env, addresses, setup) as opponents:
        world = replace(world, opponents=opponents)
        yield player_of(config, world, policy, filters_of(config.rollout), absence)


if __name__ == "__main__":
    main(int(sys.argv[1]), opened_player)
