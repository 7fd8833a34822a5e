"""The places of a run's processes: the GPUs of this machine, each handed out once, or those of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

from agentrl.assembly.cluster import (
    Needs,
    fleets_of,
    needs_of,
    num_ranks,
    ranks_have_gpus,
    run_layout,
    server_names,
    server_needs,
    uses_ray,
)
from agentrl.assembly.config import RunConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.launch import Launcher, LocalLauncher
from agentrl.errors import ConfigError
from agentrl.processes.children import Children
from agentrl.processes.config import ClusterConfig
from agentrl.processes.gpus import (
    NO_GPU,
    bf16_peak,
    check_gpus,
    in_words,
    own_gpus,
    present_gpus,
    variables_of,
)
from agentrl.processes.placement import ClusterLayout, LocalGpus, layout_of
from agentrl.rollout.players.launcher import PlayerLauncher
from agentrl.rollout.players.local import LocalPlayers
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.snapshots import Ranks
from agentrl.types import JSON

C = TypeVar("C", bound=RunConfig)


class ProcessPlaces(Protocol):
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
        """The players, each of which sees no GPUs but its own."""
        return LocalPlayers(
            len(self.gpus.players), [variables_of(gpus) or NO_GPU for gpus in self.gpus.players]
        )

    def ranks(self, world_size: int, folder: Path, *, preloaded: str) -> Processes:
        """Start ranks; see `Processes`."""
        own = self.gpus.ranks[:world_size]
        return Processes(world_size, folder, preloaded=preloaded, places=Children(own) if own else None)

    @property
    def notice(self) -> str | None:
        """A sentence where ranks and servers share GPUs that are too few for both; None = they do not."""
        if self.colocated or not (shared := self.gpus.shared):
            return None
        return (
            f"Ranks and servers share GPU {', '.join(shared)}: there are too few for both. What one of them "
            "holds, the other lacks; colocate = true has them take turns."
        )


def local_places(config: RunConfig) -> LocalPlaces:
    """The places of a run on this machine, whose GPUs are handed out once (`ClusterLayout.on_one_machine`).

    Raises:
        ConfigError: there are too few for the ranks, or for the servers and players.
    """
    has_gpus = ranks_have_gpus(config)
    if has_gpus and num_ranks(config):
        check_gpus(num_ranks(config))
    layout = run_layout(config, has_gpus=has_gpus)
    return _here(layout, server_needs(config), colocated=config.trainer.colocate)


def local_servers(engine: EngineConfig, section: ClusterConfig) -> LocalPlaces:
    """The places of servers of a command that starts nothing else, as `local_places` of a run."""
    needs = needs_of(engine, section)
    return _here(layout_of(None, [*chain.from_iterable(needs.values())], colocate=False), needs)


def _here(layout: ClusterLayout, needs: Needs, *, colocated: bool = False) -> LocalPlaces:
    gpus = own_gpus() if layout.num_gpus else []
    if len(gpus) < layout.least_gpus:
        raise ConfigError(
            f"{in_words()}, and its servers need {layout.least_gpus}; have more, or lower "
            "rollout_num_gpus_per_engine or num_gpus_per_engine."
        )
    handed_out = layout.on_one_machine(gpus)
    return LocalPlaces(handed_out, fleets_of(needs, handed_out.servers), colocated)


def is_for_gpus(config: RunConfig) -> bool:
    """Whether ranks get GPUs, for a dry run: here, or on the machine that the run is for.

    It is for another one where this has no GPU, and bf16 or a server asks for some.
    """
    if config.trainer.trainer != "megatron" or own_gpus():
        return ranks_have_gpus(config) or config.trainer.device == "cuda"
    servers = chain.from_iterable(server_needs(config).values())
    return ranks_have_gpus(config) or config.trainer.bf16 or any(server.gpus for server in servers)


def peak_of_ranks(config: RunConfig) -> float | None:
    """What a rank's GPU multiplies at most (FLOP/s); None = it has none, in bf16 and on this machine, whose
    peak is known."""
    if config.cluster.cluster != "local" or not config.trainer.bf16 or not is_for_gpus(config):
        return None
    peaks = {bf16_peak(gpu.name) for gpu in present_gpus()}
    return peaks.pop() if len(peaks) == 1 else None


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
    if uses_ray(config):
        layout = run_layout(config, has_gpus=ranks_have_gpus(config))
        ranks, servers, players = (
            [tuple(f"{gpu} of bundle {slot.bundle}" for gpu in slot.gpus) for slot in slots]
            for slots in (layout.ranks, layout.servers, layout.players)
        )
    else:
        ranks, servers, players = map(list, planned_gpus(config))
    owners = [f"rank {n}" for n in range(len(ranks))]
    owners += [f"{name} server {number}" for name, number in server_names(config)]
    owners += [f"player {n}" for n in range(len(players))]
    cards: dict[str, list[JSON]] = {}
    for owner, gpus in zip(owners, [*ranks, *servers, *players], strict=True):
        for gpu in gpus:
            cards.setdefault(f"GPU {gpu}", []).append(owner)
    return {**cards}
