"""The players of a run, in its own process: the plan that each is built from, and where they start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.config import RunConfig
from agentrl.assembly.places import ProcessPlaces
from agentrl.engine.sglang.fleet import Fleet
from agentrl.envs.registry import EnvSpec, find
from agentrl.http.guarded import headers_to
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.players import Players
from agentrl.run.parts import Records
from agentrl.runtime.activity import Activities
from agentrl.trainer.launch.messages import pickled_plan
from agentrl.types.seams import Policy
from agentrl.weights.hf.source import ModelSource

_PROGRAM: Final = "agentrl.run.player"
_LOOPBACK: Final = {"localhost", "127.0.0.1", "::1"}


class ServersAt(NamedTuple):
    """Servers to which a player sends its requests itself. headers: of each, with a key if need be."""

    url: str
    headers: Mapping[str, str]


class PlayerSetup(NamedTuple):
    """What a player is built from.

    directory: of the model, for its tokenizer. env: the environment that the driver has under that name.
    addresses: of further models, each with the headers of requests to it. folder: for the output of
    opponents. servers: None = its requests go through the driver.
    """

    config: RunConfig
    directory: Path
    env: EnvSpec
    addresses: Mapping[str, ServersAt]
    folder: Path
    servers: ServersAt | None


def players_of(
    config: RunConfig,
    source: ModelSource,
    engine: Policy | None,
    records: Records,
    addresses: Addresses,
    places: ProcessPlaces,
) -> Players | None:
    """The players of a run; None = the driver plays, or nothing plays.

    places: of each.

    Raises:
        ConfigError: no other process can import the environment.
    """
    if engine is None or not config.num_players:
        return None
    folder, fleet = records.folder.players, _reached(engine, places)
    servers = None if fleet is None else ServersAt(fleet.url, {**fleet.policy.headers})
    env = find(config.env.env)
    models = {name: ServersAt(url, {**headers_to(url)}) for name, url in addresses.items()}
    plan = PlayerSetup(config, source.directory.absolute(), env, models, folder, servers)
    activities: Activities = records.monitor.activities
    started = PlayerPlan(_PROGRAM, pickled_plan(plan), folder)
    clients = None if fleet is None else fleet.clients
    players = Players(places.players, started, engine, activities, records.console.line, clients)
    records.monitor.follow(lambda: players.where)
    return players


def _reached(engine: Policy, places: ProcessPlaces) -> Fleet | None:
    """The servers of the engine, where every player reaches them."""
    if not isinstance(engine, Fleet):
        return None
    is_loopback = urlsplit(engine.url).hostname in _LOOPBACK
    return None if is_loopback and places.has_players_elsewhere else engine
