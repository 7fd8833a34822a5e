"""A player of a run, in a process of its own: python -m agentrl.run.player FD, its end of the pipe.

It builds its environment, rewards and renderer by the run's configuration, as the driver does.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace

from agentrl.assembly.env import run_env_factory
from agentrl.assembly.fleet import ServedAdapters, fleet_policy
from agentrl.assembly.model import expert_layers_of
from agentrl.assembly.opponents import OpponentSetup, opened_opponents
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.engine.sglang import SGLangPolicy
from agentrl.envs.registry import register
from agentrl.http.guarded import sent_with
from agentrl.rollout.players.hosted import HostedPlayer, main
from agentrl.run.parts import World, filters_of, player_of, scoring_of
from agentrl.run.players import PlayerSetup, ServersAt
from agentrl.runtime.clocks import Waits
from agentrl.types.seams import Policy
from agentrl.weights.hf.source import ModelSource, open_source


@asynccontextmanager
async def opened_player(plan: bytes, policy: Policy, absence: Waits) -> AsyncIterator[HostedPlayer]:
    """The player of a plan. policy: the driver's engine, for a plan without servers.

    Raises:
        UserError: the environment or a function by path cannot be imported here, or an opponent not opened.
    """
    setup = PlayerSetup(*pickle.loads(plan))
    config, spec = setup.config, setup.env
    addresses = {name: served.url for name, served in setup.addresses.items()}
    if ":" not in spec.id:
        register(spec.id, spec.env_class, **spec.kwargs)
    make_env = run_env_factory(config, addresses)
    env = make_env()
    scorer, play = await scoring_of(config, make_env, None, addresses)
    source = open_source(setup.directory)
    renderer = build_renderer(source, dialect_of(env, config.rendering), config.rendering)
    layers = expert_layers_of(config, source.config)
    world = World(make_env, scorer, renderer, play_episode=play, expert_layers=layers)
    # Each player has opponents of its own.
    opponent_setup = OpponentSetup(config.rendering, setup.folder / f"opponents-{os.getpid()}")
    with _reached(setup.addresses.values()):
        async with (
            opened_opponents(config.env.opponents, env, addresses, opponent_setup) as opponents,
            _own_policy(setup, source) as own,
        ):
            world = replace(world, opponents=opponents)
            filters = filters_of(config.rollout)
            player = player_of(config, world, own or policy, filters, absence, may_move=True)
            yield HostedPlayer(player, own, keeps=config.rollout.is_async)


@contextmanager
def _reached(models: Iterable[ServersAt]) -> Iterator[None]:
    """Requests to the run's further models have the headers that these ask for, for the block."""
    with ExitStack() as stack:
        for url, headers in models:
            stack.enter_context(sent_with(url, headers))
        yield


@asynccontextmanager
async def _own_policy(setup: PlayerSetup, source: ModelSource) -> AsyncIterator[SGLangPolicy | None]:
    """The policy of the plan's servers, which ends its requests at the end of the block."""
    if setup.servers is None:
        yield None
        return
    (url, headers), config = setup.servers, setup.config
    policy = fleet_policy(
        config.engine, url, headers, source.vocab_size, source.decode, num_clients=config.num_players
    )
    served = ServedAdapters.of(config)
    policy.adapters = None if served is None else served.choice
    try:
        yield policy
    finally:
        await policy.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), opened_player)
