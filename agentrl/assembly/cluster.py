"""The cluster of a run: from the configuration to the reserved places of its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TypeAlias, TypeVar

from agentrl.assembly.config import RunConfig
from agentrl.engine.config import EngineConfig, ServerGroup
from agentrl.engine.sglang.launch.ray_servers import RayLauncher
from agentrl.envs.registry import find
from agentrl.errors import ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.gpus import num_gpus
from agentrl.processes.placement import (
    Allocation,
    ClusterLayout,
    PlayerNeeds,
    RankNeeds,
    ServerNeeds,
    described,
    layout_of,
)
from agentrl.processes.ray.actors import Actors
from agentrl.processes.ray.placement import RayPlacement, placed
from agentrl.processes.ray.session import RaySession, cluster_address, connected, passed_variables
from agentrl.rollout.players.ray_players import RayPlayers
from agentrl.trainer.launch.processes import Processes
from agentrl.types import JSON

POLICY = "policy"
EVALUATIONS = "evaluations"
"""Fleets of servers: of the policy, and of an engine of evaluations alone."""
_MODELS = "sglang_models."
T = TypeVar("T")
Needs: TypeAlias = dict[str, list[ServerNeeds]]
"""What the servers of each fleet take, by its name."""


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
        # Players reach the policy's servers and further models; evaluations are played by the driver.
        clients = () if fleet == EVALUATIONS else placement.players
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

    def ranks(self, world_size: int, folder: Path, *, preloaded: str) -> Processes:
        """Start ranks; those that were started before in these allocations have ended. See `Processes`."""
        places = Actors(self.session, self.placement.group, self.placement.ranks[:world_size])
        return Processes(world_size, folder, preloaded=preloaded, places=places)


@contextmanager
def run_cluster(config: RunConfig, folder: Path) -> Iterator[RunCluster | None]:
    """The cluster, for the block; None where the run is on this machine alone, or places nothing.

    It blocks until Ray is up and has room for the run. folder: of the run, for the logs of a Ray of its own.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers, or it has no room for the run.
    """
    if not uses_ray(config):
        yield None
        return
    metadata, needs = _metadata(config, folder), server_needs(config)
    with connected(config.cluster, folder, os.environ, metadata) as session:
        layout = run_layout(config, has_gpus=session.has_gpus)
        with _reserved(session, config.cluster, layout, needs) as cluster:
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
    needs = needs_of(engine, section)
    if section.cluster == "local" or not needs:
        yield None
        return
    with connected(section, folder, os.environ, metadata) as session:
        layout = layout_of(None, [*chain.from_iterable(needs.values())], colocate=False)
        with _reserved(session, section, layout, needs) as cluster:
            yield cluster


@contextmanager
def _reserved(
    session: RaySession, section: ClusterConfig, layout: ClusterLayout, needs: Needs
) -> Iterator[RunCluster]:
    """The places of a layout, for the block. needs: of the servers in it."""
    placement = placed(session, layout, section.placement_timeout_s)
    try:
        yield RunCluster(session, placement, fleets_of(needs, placement.servers))
    finally:
        placement.remove()


def ranks_have_gpus(config: RunConfig) -> bool:
    """Whether each rank of the trainer gets a GPU; in a cluster that runs already they are taken to."""
    if config.trainer.trainer != "megatron" and config.trainer.device == "cpu":
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
    ranks = num_ranks(config)
    if not ranks or (config.trainer.trainer == "torch" and ranks == 1):
        return
    if config.cluster.cluster == "local" and (nodes := config.layout.actor_num_nodes) > 1:
        raise ConfigError(
            f"actor_num_nodes = {nodes} needs cluster = ray, which starts ranks on several machines; add it, "
            "or take one machine."
        )
    if environment.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "a run starts all of its ranks itself, and WORLD_SIZE is in the environment; start this command "
            "once, without a launcher such as torchrun, or unset WORLD_SIZE."
        )


def run_layout(config: RunConfig, *, has_gpus: bool) -> ClusterLayout:
    """The bundles and the slots of the run. has_gpus: whether any machine of the cluster has a GPU."""
    nodes, per_node, gpus = config.layout.actor_num_nodes, config.layout.actor_num_gpus_per_node, 0
    if config.trainer.trainer == "megatron" or config.trainer.device == "cuda":
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
    needs = needs_of(config.engine, config.cluster)
    if POLICY in needs and config.has_eval_engine:
        needs[EVALUATIONS] = needs[POLICY]
    return needs


def needs_of(engine: EngineConfig, section: ClusterConfig) -> Needs:
    """The servers of each fleet of an engine that are started for it, each with a part on each machine.

    Raises:
        ConfigError: one is spread over several machines, and there is one.
    """
    needs: Needs = {}
    if engine.engine == "sglang" and engine.sglang_url is None:
        needs[POLICY] = [
            part for group in engine.sglang_groups or engine.groups for part in _parts(engine, group, section)
        ]
    for name, model in engine.sglang_models.items():
        needs[fleet_of_model(name)] = _parts(engine, model.group, section)
    return needs


def _parts(engine: EngineConfig, group: ServerGroup, section: ClusterConfig) -> list[ServerNeeds]:
    """What the servers of a group take, on each of their machines."""
    gpus, machines = engine.gpus_of(group), engine.machines_of(group)
    if machines > 1 and section.cluster == "local":
        raise ConfigError(
            f"a server of {gpus} GPUs is spread over {machines} machines of num_gpus_per_node = "
            f"{engine.num_gpus_per_node}; add cluster = ray, which has several, or take fewer GPUs."
        )
    starts = group.role is not None
    cpus = section.num_cpus_per_server if starts else 0.0
    one = [ServerNeeds(cpus, gpus // machines, n, starts) for n in range(machines)]
    return one * group.num_engines


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


def fleets_of(needs: Needs, places: Sequence[T]) -> dict[str, Sequence[T]]:
    """The places of all servers that start, in their order, by the fleet that each belongs to."""
    following = iter(places)
    return {
        name: tuple(place for server, place in zip(servers, following, strict=False) if server.starts)
        for name, servers in needs.items()
    }


def uses_ray(config: RunConfig) -> bool:
    """Whether Ray places any process of the run."""
    return config.cluster.cluster == "ray" and bool(
        num_ranks(config) or server_needs(config) or config.num_players
    )


def cluster_facts(config: RunConfig) -> dict[str, JSON]:
    """What the run would place, and where; no cluster is asked."""
    if not uses_ray(config):
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
            for (name, number), slot in zip(server_names(config), layout.servers, strict=True)
        ],
        "players": [f"player {n} in bundle {slot.bundle}" for n, slot in enumerate(layout.players)],
    }


def server_names(config: RunConfig) -> list[tuple[str, str]]:
    """The fleet and the number in it of each server that the run starts; of its parts, where it is spread."""
    names: list[tuple[str, str]] = []
    for name, fleet in server_needs(config).items():
        numbers = accumulate(int(part.machine == 0 and part.starts) for part in fleet)
        for number, part in zip(numbers, fleet, strict=True):
            if not part.starts:
                names.append((name, "(placeholder)"))
                continue
            # The first of several machines is named as the server is.
            names.append((name, f"{number - 1}" + (f", machine {part.machine + 1}," if part.machine else "")))
    return names


def num_ranks(config: RunConfig) -> int:
    """Ranks of the run's trainer (count); 0 = nothing is trained."""
    if config.command == "train":
        trains = config.rollout.num_rollout or config.warm_start.warm_start_steps
        if config.rollout.debug_rollout_only or not trains:
            return 0
    return config.layout.world_size
