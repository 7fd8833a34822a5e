"""A player of a run, in a process of its own: python -m agentrl.run.player FD, its end of the pipe.

It builds its environment, rewards and renderer by the run's configuration, as the driver does.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.assembly.env import run_env_factory
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.checkpoints.source import open_source
from agentrl.clocks import Waits
from agentrl.envs.registry import register
from agentrl.protocols import Policy
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.hosted import main
from agentrl.run.parts import World, filters_of, player_of, scoring_of
from agentrl.run.players import PlayerSetup


@asynccontextmanager
async def opened_player(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[GroupPlayer]:
    """The player of a plan.

    Raises:
        UserError: the environment or a function by path cannot be imported here, or an opponent not opened.
    """
    config, directory, spec, addresses, folder = PlayerSetup(*pickle.loads(plan))
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
        yield player_of(config, world, policy, filters_of(config.rollout), absence, may_move=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), opened_player)
