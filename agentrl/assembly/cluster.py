"""The places of a run's processes: GPUs of this machine, or allocations that are reserved in a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from agentrl.assembly.config import RunConfig
from agentrl.cluster.config import ClusterConfig
from agentrl.cluster.placement import (
    Allocation,
    Layout,
    LocalGpus,
    PlayerNeeds,
    RankNeeds,
    ServerNeeds,
    described,
    layout_of,
)
from agentrl.cluster.ray.placement import RayPlacement, placed
from agentrl.cluster.ray.session import RaySession, cluster_address, connected, passed_variables
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.launch import Launcher, LocalLauncher
from agentrl.engine.sglang.launch.ray_servers import RayLauncher
from agentrl.envs.registry import find
from agentrl.errors import ConfigError
from agentrl.gpus import check_gpus, in_words, num_gpus, own_gpus, variables_of
from agentrl.rollout.players.launcher import PlayerLauncher
from agentrl.rollout.players.local import LocalPlayers
from agentrl.rollout.players.ray_players import RayPlayers
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.launch.ray_ranks import RayRanks
from agentrl.trainer.ranks import Ranks
from agentrl.types import JSON

POLICY = "policy"
EVALUATIONS = "evaluations"
"""Fleets of servers: of the policy, and of an engine of evaluations alone."""
_MODELS = "sglang_models."
T = TypeVar("T")
C = TypeVar("C", bound=RunConfig)
Needs: TypeAlias = dict[str, list[ServerNeeds]]
"""What the servers of each fleet take, by its name."""


class Places(Protocol):
    """A place for every process of a run: on this machine, or in a cluster."""

    @property
    def notice(self) -> str | None:
        """A sentence about them at the beginning of a run; None = there is nothing to say."""

    @property
    def dashboard(self) -> str:
        """The address of the cluster's dashboard; "" = there is none."""

    def launcher(self, fleet: str) -> Launcher:
        """The places of the servers of a fleet, by its name."""

    @property
    def players(self) -> PlayerLauncher:
        """The places of the players."""

    @property
    def has_players_elsewhere(self) -> bool:
        """Whether a player is on another machine than the run."""

    def ranks(self, world_size: int, folder: Path, *, preloaded: str) -> Ranks:
        """Start ranks; those that were started before in these places have ended."""


@dataclass(frozen=True, slots=True)
class LocalPlaces:
    """Processes on this machine, each with its GPUs. fleets: those of each server, by the fleet's name.

    colocated: whether ranks and servers share GPUs since they take turns. Left out, no process has one.
    """

    gpus: LocalGpus = field(default_factory=LocalGpus)
    fleets: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    colocated: bool = False
    has_players_elsewhere: bool = False
    dashboard: str = ""

    def launcher(self, fleet: str) -> LocalLauncher:
        """The GPUs of the servers of a fleet, by its name."""
        return LocalLauncher(self.fleets.get(fleet, ()))

    @property
    def players(self) -> LocalPlayers:
        """The GPUs of the players."""
        return LocalPlayers(len(self.gpus.players), [variables_of(gpus) for gpus in self.gpus.players])

    def ranks(self, world_size: int, folder: Path, *, preloaded: str) -> Processes:
        """Start ranks; see `Processes`."""
        return Processes(world_size, folder, preloaded=preloaded, gpus=self.gpus.ranks[:world_size])

    @property
    def notice(self) -> str | None:
        """A sentence where ranks and servers share GPUs that are too few for both; None = they do not."""
        if self.colocated or not (shared := self.gpus.shared):
            return None
        return (
            f"Ranks and servers share GPU {', '.join(shared)}: there are too few for both. What one of them "
            "holds, the other lacks; colocate = true has them take turns."
        )


@dataclass(frozen=True, slots=True)
class RunCluster:
    """A Ray cluster with an allocation for every process of a run. fleets: of servers, by name."""

    session: RaySession
    placement: RayPlacement
    fleets: Mapping[str, Sequence[Allocation]]

    @property
    def notice(self) -> str | None:
        """Where Ray shows the run; None = nowhere."""
        return self.session.notice

    @property
    def dashboard(self) -> str:
        """The address of Ray's dashboard; "" = there is none."""
        return self.session.dashboard or ""

    def launcher(self, fleet: str) -> RayLauncher:
        """The places of the servers of a fleet, by its name."""
        placement = self.placement
        clients = placement.players if fleet == POLICY else ()
        places, ranks = self.fleets.get(fleet, ()), placement.ranks
        return RayLauncher(self.session, placement.group, places, ranks, clients, title=title_of(fleet))

    @property
    def has_players_elsewhere(self) -> bool:
        """Whether a player is on another machine than the run."""
        return any(place.node != self.session.node for place in self.placement.players)

    @property
    def players(self) -> RayPlayers:
        """The places of the players."""
        return RayPlayers(self.session, self.placement.group, self.placement.players)

    @property
    def needed(self) -> dict[str, str]:
        """The machines that the run cannot do without, by Ray's id, and what each is, for a sentence."""
        numbers: dict[Allocation, list[int]] = {}
        for number, place in enumerate(self.placement.ranks):
            numbers.setdefault(Allocation(0, place.node, place.host, ()), []).append(number)
        own = {self.session.node: f"{self.session.host}, the machine of the run's own process,"}
        return {
            place.node: f"{place.host}, the machine of {_ranks_in_words(of_place)},"
            for place, of_place in numbers.items()
        } | own

    def ranks(self, world_size: int, folder: Path, *, preloaded: str) -> RayRanks:
        """Start ranks; those that were started before in these allocations have ended. See `RayRanks`."""
        return RayRanks(self.session, self.placement, world_size, folder, preloaded=preloaded)


@contextmanager
def run_cluster(config: RunConfig, folder: Path) -> Iterator[RunCluster | None]:
    """The cluster, for the block; None where the run is on this machine alone, or places nothing.

    It blocks until Ray is up and has room for the run. folder: of the run, for the logs of a Ray of its own.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers, it has no room for the run, or see `check_reach`.
    """
    if not _places(config):
        yield None
        return
    metadata, needs = _metadata(config, folder), server_needs(config)
    with connected(config.cluster, folder, os.environ, metadata) as session:
        layout = run_layout(config, has_gpus=session.has_gpus)
        with _reserved(session, config.cluster, layout, needs) as cluster:
            players = cluster.placement.players
            check_reach(config, [place.host for place in players if place.node != session.node])
            yield cluster


@contextmanager
def servers_cluster(
    section: ClusterConfig, engine: EngineConfig, folder: Path, metadata: Mapping[str, str]
) -> Iterator[RunCluster | None]:
    """The cluster of a command that starts servers and nothing else, as `run_cluster` of a run.

    metadata: of the job that Ray lists.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers, or it has no room for the servers.
    """
    needs = _needs_of(engine, section)
    if section.cluster == "local" or not needs:
        yield None
        return
    with connected(section, folder, os.environ, metadata) as session:
        layout = layout_of(None, [*chain.from_iterable(needs.values())], colocate=False)
        with _reserved(session, section, layout, needs) as cluster:
            yield cluster


@contextmanager
def _reserved(
    session: RaySession, section: ClusterConfig, layout: Layout, needs: Needs
) -> Iterator[RunCluster]:
    """The places of a layout, for the block. needs: of the servers in it."""
    placement = placed(session, layout, section.placement_timeout_s)
    try:
        yield RunCluster(session, placement, _fleets(needs, placement.servers))
    finally:
        placement.remove()


def local_places(config: RunConfig) -> LocalPlaces:
    """The places of a run on this machine, whose GPUs are handed out once (see `Layout.on_one_machine`).

    Raises:
        ConfigError: there are too few for the ranks, or for the servers and players.
    """
    has_gpus = ranks_have_gpus(config)
    if has_gpus and num_ranks(config):
        check_gpus(config.megatron.world_size)
    layout = run_layout(config, has_gpus=has_gpus)
    return _here(layout, server_needs(config), colocated=config.trainer.colocate)


def local_servers(engine: EngineConfig, section: ClusterConfig) -> LocalPlaces:
    """The places of servers of a command that starts nothing else, as `local_places` of a run."""
    needs = _needs_of(engine, section)
    return _here(layout_of(None, [*chain.from_iterable(needs.values())], colocate=False), needs)


def _here(layout: Layout, needs: Needs, *, colocated: bool = False) -> LocalPlaces:
    gpus = own_gpus() if layout.num_gpus else []
    if len(gpus) < layout.least_gpus:
        raise ConfigError(
            f"{in_words()}, and its servers need {layout.least_gpus}; have more, or lower "
            "rollout_num_gpus_per_engine or num_gpus_per_engine."
        )
    handed_out = layout.on_one_machine(gpus)
    return LocalPlaces(handed_out, _fleets(needs, handed_out.servers), colocated)


def ranks_have_gpus(config: RunConfig) -> bool:
    """Whether each rank of the trainer gets a GPU; in a cluster that runs already they are taken to."""
    if config.trainer.trainer != "megatron":
        return False
    if config.cluster.cluster == "ray":
        if (chosen := config.cluster.num_gpus_per_rank) is not None:
            return chosen > 0
        if cluster_address(config.cluster, os.environ) is not None:
            return True
    return num_gpus() > 0


def check_machines(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Check what can be known of the machines of a run before any process starts.

    Raises:
        MissingExtraError: cluster = ray, and it is not installed.
        ConfigError: several machines without Ray; this process is one of many that a launcher started; or a
            variable of ray_env_vars is not set.
    """
    if config.cluster.cluster == "ray":
        passed_variables(config.cluster, environment)
    if config.trainer.trainer != "megatron" or not num_ranks(config):
        return
    if config.cluster.cluster == "local" and (nodes := config.megatron.actor_num_nodes) > 1:
        raise ConfigError(
            f"actor_num_nodes = {nodes} needs cluster = ray, which starts ranks on several machines; add it, "
            "or take one machine."
        )
    if environment.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a run starts all of its ranks itself, and WORLD_SIZE is in the environment; start this command "
            "once, without a launcher such as torchrun, or unset WORLD_SIZE."
        )


def check_reach(config: RunConfig, hosts: Sequence[str]) -> None:
    """Check that players on these other machines reach all that they need.

    Raises:
        ConfigError: the run serves models for environments, at an address of its own machine alone.
    """
    if hosts and config.engine.sglang_models:
        name = next(iter(config.engine.sglang_models))
        raise ConfigError(
            f"a player on {hosts[0]} cannot reach sglang_models.{name}, which the run serves on the loopback "
            "address of its own machine; start that model's server yourself and give its URL, or leave "
            "num_rollout_workers out."
        )


def run_layout(config: RunConfig, *, has_gpus: bool) -> Layout:
    """The bundles and the slots of the run. has_gpus: whether any machine of the cluster has a GPU."""
    megatron = config.megatron
    nodes, per_node, gpus = 1, 1, 0
    if config.trainer.trainer == "megatron":
        nodes, per_node = megatron.actor_num_nodes, megatron.actor_num_gpus_per_node
        chosen = config.cluster.num_gpus_per_rank
        gpus = int(has_gpus) if chosen is None else chosen
    ranks = RankNeeds(nodes, per_node, config.cluster.num_cpus_per_rank, gpus) if num_ranks(config) else None
    servers = [*chain.from_iterable(server_needs(config).values())]
    return layout_of(ranks, servers, player_needs(config), colocate=config.trainer.colocate)


def player_needs(config: RunConfig) -> list[PlayerNeeds]:
    """What each player of the run takes."""
    if not config.num_players:
        return []
    asked = find(config.env.env).env_class.resources
    chosen = config.cluster.num_cpus_per_rollout_worker
    cpus = asked.num_cpus if chosen is None else chosen
    return [PlayerNeeds(cpus, asked.num_gpus, round(asked.memory_gb * 1e9))] * config.num_players


def server_needs(config: RunConfig) -> Needs:
    """The servers of each fleet that the run starts."""
    if config.command != "train" or config.rollout.replay is not None:
        return {}
    needs = _needs_of(config.engine, config.cluster)
    if POLICY in needs and config.has_eval_engine:
        needs[EVALUATIONS] = needs[POLICY]
    return needs


def _needs_of(engine: EngineConfig, section: ClusterConfig) -> Needs:
    needs: Needs = {}
    if engine.engine == "sglang" and engine.sglang_url is None:
        needs[POLICY] = [
            ServerNeeds(section.num_cpus_per_server, engine.gpus_of(group))
            for group in engine.groups
            for _ in range(group.num_engines)
        ]
    for name, model in engine.sglang_models.items():
        each = ServerNeeds(section.num_cpus_per_server, model.num_gpus_per_engine)
        needs[fleet_of_model(name)] = [each] * model.num_engines
    return needs


def _ranks_in_words(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def fleet_of_model(name: str) -> str:
    """The fleet that serves one of the run's further models."""
    return f"{_MODELS}{name}"


def title_of(fleet: str) -> str:
    """What the names of the servers of a fleet begin with, where all processes of a run are listed."""
    if fleet == POLICY:
        return ""
    return "eval " if fleet == EVALUATIONS else f"{fleet.removeprefix(_MODELS)} "


def _metadata(config: RunConfig, folder: Path) -> dict[str, str]:
    """Where to find the run, for whoever looks at the cluster."""
    observe, found = config.observe, {"run": config.run_name, "folder": str(folder.absolute())}
    if observe.use_prometheus and observe.prometheus_port:
        found["prometheus"] = f"http://{observe.prometheus_host}:{observe.prometheus_port}/metrics"
    return found


def _fleets(needs: Needs, places: Sequence[T]) -> dict[str, Sequence[T]]:
    fleets, first = {}, 0
    for name, servers in needs.items():
        fleets[name] = places[first : first + len(servers)]
        first += len(servers)
    return fleets


def _places(config: RunConfig) -> bool:
    """Whether Ray places any process of the run."""
    return config.cluster.cluster == "ray" and bool(
        num_ranks(config) or server_needs(config) or config.num_players
    )


def cluster_facts(config: RunConfig) -> dict[str, JSON]:
    """What the run would place, and where; no cluster is asked."""
    if not _places(config):
        return {}
    address = cluster_address(config.cluster, os.environ)
    layout = run_layout(config, has_gpus=ranks_have_gpus(config))
    where = "a Ray of its own on this machine" if address is None else f"the Ray cluster at {address}"
    return {
        "where": where,
        "reserves": described(layout.bundles),
        "ranks": [f"rank {n} in bundle {slot.bundle}" for n, slot in enumerate(layout.ranks)],
        "servers": [
            f"{name}, server {number} in bundle {slot.bundle}"
            for (name, number), slot in zip(_server_names(config), layout.servers, strict=True)
        ],
        "players": [f"player {n} in bundle {slot.bundle}" for n, slot in enumerate(layout.players)],
    }


def is_for_gpus(config: RunConfig) -> bool:
    """Whether ranks get GPUs, for a dry run: here, or on the machine that the run is for.

    It is for another one where this has no GPU, and bf16 or a server asks for some.
    """
    if config.trainer.trainer != "megatron" or own_gpus():
        return ranks_have_gpus(config)
    servers = chain.from_iterable(server_needs(config).values())
    return ranks_have_gpus(config) or config.trainer.bf16 or any(server.gpus for server in servers)


def with_devices(config: C, devices: Mapping[str, int | bool]) -> C:
    """The run with the settings of its trainer that follow from its devices, where they were left out.

    devices: `ON_GPUS`, or those of the same run before.
    """
    trainer = config.trainer
    left_out = {
        name: value
        for name, value in devices.items()
        if not trainer.was_set(name) and name not in config.inactive and value != getattr(trainer, name)
    }
    if not left_out:
        return config
    return config.model_copy(update={"trainer": trainer.model_copy(update=left_out)})


def planned_gpus(config: RunConfig) -> LocalGpus:
    """The GPUs of a run on this machine, as `local_places` hands them out.

    Where this machine has none, the run is for another one: then as on a machine with as many as it asks for.

    Raises:
        ConfigError: this machine has too few.
    """
    if own_gpus():
        return local_places(config).gpus
    layout = run_layout(config, has_gpus=is_for_gpus(config))
    return layout.on_one_machine([str(number) for number in range(layout.num_gpus)])


def card_facts(config: RunConfig) -> dict[str, JSON]:
    """The processes of the run that have each GPU, by the GPU's number, or by that in its bundle.

    Raises:
        ConfigError: this machine has too few.
    """
    if _places(config):
        layout = run_layout(config, has_gpus=ranks_have_gpus(config))
        ranks, servers, players = (
            [tuple(f"{gpu} of bundle {slot.bundle}" for gpu in slot.gpus) for slot in slots]
            for slots in (layout.ranks, layout.servers, layout.players)
        )
    else:
        ranks, servers, players = map(list, planned_gpus(config))
    owners = [f"rank {n}" for n in range(len(ranks))]
    owners += [f"{name} server {number}" for name, number in _server_names(config)]
    owners += [f"player {n}" for n in range(len(players))]
    cards: dict[str, list[JSON]] = {}
    for owner, gpus in zip(owners, [*ranks, *servers, *players], strict=True):
        for gpu in gpus:
            cards.setdefault(f"GPU {gpu}", []).append(owner)
    return {**cards}


def _server_names(config: RunConfig) -> list[tuple[str, int]]:
    return [(name, number) for name, fleet in server_needs(config).items() for number in range(len(fleet))]


def num_ranks(config: RunConfig) -> int:
    """Ranks of the run's trainer (count); 0 = nothing is trained."""
    if config.command == "train":
        trains = config.rollout.num_rollout or config.warm_start.warm_start_steps
        if config.rollout.debug_rollout_only or not trains:
            return 0
    return config.megatron.world_size if config.trainer.trainer == "megatron" else 1
