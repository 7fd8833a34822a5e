"""The bundles that a run needs, and which of them each rank and each server gets. Knows nothing of Ray.

A bundle is CPUs and GPUs of one machine; Ray reserves all bundles of a run, or none. The ranks that belong on
one machine share a bundle, and so no rank talks to its neighbour over the network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple


class Bundle(NamedTuple):
    """A reservation on one machine: CPUs and GPUs (counts), memory (bytes)."""

    cpus: float
    gpus: int
    memory: int = 0


class RankNeeds(NamedTuple):
    """The trainer's ranks: `per_node` on each of `nodes` machines; what each takes (counts)."""

    nodes: int
    per_node: int
    cpus: float
    gpus: int


class ServerNeeds(NamedTuple):
    """One server, or its part on one of several machines: what it takes (counts). machine: which, from 0.

    starts: whether there is one; else its place stays empty.
    """

    cpus: float
    gpus: int
    machine: int = 0
    starts: bool = True


class PlayerNeeds(NamedTuple):
    """One player: what it takes. cpus, gpus: counts. memory: bytes."""

    cpus: float
    gpus: int
    memory: int = 0


class Slot(NamedTuple):
    """The part of a bundle that one process gets. gpus: positions among those of the bundle."""

    bundle: int
    gpus: tuple[int, ...]


class PlacedBundle(NamedTuple):
    """Where a bundle is. node: Ray's id; host: its address. devices: its GPUs, as CUDA numbers them there."""

    node: str
    host: str
    devices: tuple[str, ...]


class Allocation(NamedTuple):
    """Where one process runs. bundle: the number of its bundle in the placement group.

    devices: its GPUs, in the form of CUDA_VISIBLE_DEVICES; empty = none. has_bundle: whether it has the whole
    bundle, and goes with it where Ray moves that to another machine.
    """

    bundle: int
    node: str
    host: str
    devices: tuple[str, ...]
    has_bundle: bool = False


class LocalGpus(NamedTuple):
    """The GPUs of the ranks, the servers and the players of a run on one machine, each in their order.

    All are in the form of CUDA_VISIBLE_DEVICES; a process without any has none of the run's.
    """

    ranks: tuple[tuple[str, ...], ...] = ()
    servers: tuple[tuple[str, ...], ...] = ()
    players: tuple[tuple[str, ...], ...] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """Those that a rank has, and a server or a player, too."""
        others = {gpu for gpus in (*self.servers, *self.players) for gpu in gpus}
        return tuple(gpu for gpus in self.ranks for gpu in gpus if gpu in others)


class Allocations(NamedTuple):
    """Where the ranks, the servers and the players of a run are, each in their order."""

    ranks: tuple[Allocation, ...]
    servers: tuple[Allocation, ...]
    players: tuple[Allocation, ...]


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The bundles of a run, those of the ranks first; the slot of every rank, server and player."""

    bundles: tuple[Bundle, ...]
    ranks: tuple[Slot, ...]
    servers: tuple[Slot, ...]
    players: tuple[Slot, ...]

    def allocations(self, placed: Sequence[PlacedBundle], driver_node: str) -> Allocations:
        """The allocations of all processes, once the bundles are placed.

        Equal bundles are interchangeable: they are taken node by node, the driver's node first, and on a node
        by their first device. So neighbouring ranks are on one machine, and rank 0 is near the driver.
        """
        order = self._order(placed, driver_node)
        of_ranks = {slot.bundle for slot in self.ranks}

        def allocation(slot: Slot) -> Allocation:
            bundle = order[slot.bundle]
            where = placed[bundle]
            devices = sorted(where.devices, key=_natural)
            return Allocation(
                bundle, where.node, where.host, tuple(devices[n] for n in slot.gpus if n < len(devices))
            )

        return Allocations(
            tuple(map(allocation, self.ranks)),
            tuple(allocation(slot)._replace(has_bundle=slot.bundle not in of_ranks) for slot in self.servers),
            tuple(allocation(slot)._replace(has_bundle=True) for slot in self.players),
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of all bundles (count)."""
        return sum(bundle.gpus for bundle in self.bundles)

    @property
    def least_gpus(self) -> int:
        """GPUs that one machine needs at least: of the ranks, or of all others, if these share them (count).

        Where servers take turns with ranks, their GPUs are shared already, and the others need more.
        """
        of_ranks = {slot.bundle for slot in self.ranks}
        if any(slot.bundle in of_ranks for slot in self.servers):
            return self.num_gpus
        return max(self._num_of_ranks, self.num_gpus - self._num_of_ranks)

    @property
    def _num_of_ranks(self) -> int:
        return sum(self.bundles[number].gpus for number in {slot.bundle for slot in self.ranks})

    def on_one_machine(self, gpus: Sequence[str]) -> LocalGpus:
        """Hand out the GPUs of one machine, `least_gpus` or more: each to one bundle, while they last.

        Where there are too few for that, those of the ranks are the first ones, and those of all others the
        last: so as few as possible are shared, and never two ranks, two servers or two players share one.
        """
        assert self.least_gpus <= len(gpus), "somebody has asked whether there are enough"
        first, starts = 0, []
        of_ranks, of_others = self._num_of_ranks, self.num_gpus - self._num_of_ranks
        for number, bundle in enumerate(self.bundles):
            if number == len({slot.bundle for slot in self.ranks}):
                first = min(of_ranks, len(gpus) - of_others)
            starts.append(first)
            first += bundle.gpus

        def those_of(slots: Sequence[Slot]) -> tuple[tuple[str, ...], ...]:
            return tuple(tuple(gpus[starts[slot.bundle] + gpu] for gpu in slot.gpus) for slot in slots)

        return LocalGpus(those_of(self.ranks), those_of(self.servers), those_of(self.players))

    def _order(self, placed: Sequence[PlacedBundle], driver_node: str) -> dict[int, int]:
        """Which placed bundle each bundle of the layout is."""
        of_ranks, of_players = ({slot.bundle for slot in slots} for slots in (self.ranks, self.players))
        order: dict[int, int] = {}
        kinds: dict[tuple[Bundle, bool, bool], list[int]] = {}
        for number, bundle in enumerate(self.bundles):
            kinds.setdefault((bundle, number in of_ranks, number in of_players), []).append(number)
        for numbers in kinds.values():
            by_place = sorted(numbers, key=lambda number: _place_key(placed[number], driver_node))
            order |= dict(zip(numbers, by_place, strict=True))
        return order


def layout_of(
    ranks: RankNeeds | None,
    servers: Sequence[ServerNeeds],
    players: Sequence[PlayerNeeds] = (),
    *,
    colocate: bool,
) -> ClusterLayout:
    """The bundles for the ranks, the servers and the players of a run. ranks: None = nothing is trained.

    colocate: a server takes GPUs of one of the ranks' bundles, each GPU of it for at most one server; one
    that finds no room there, or takes no GPU, gets a bundle of its own, as all do without `colocate`. Each
    player has a bundle of its own.
    """
    shared = [0] * (ranks.nodes if ranks is not None and colocate else 0)
    room = ranks.per_node * ranks.gpus if ranks is not None else 0
    cpus_of_shared = [0.0] * len(shared)
    own: list[Bundle] = []
    num_of_ranks = ranks.nodes if ranks is not None else 0
    slots_of_servers: list[Slot] = []
    for server in servers:
        fits = (n for n, taken in enumerate(shared) if server.gpus and taken + server.gpus <= room)
        home = next(fits, None)
        if home is None:
            slots_of_servers.append(Slot(num_of_ranks + len(own), tuple(range(server.gpus))))
            own.append(Bundle(server.cpus, server.gpus))
            continue
        slots_of_servers.append(Slot(home, tuple(range(shared[home], shared[home] + server.gpus))))
        shared[home] += server.gpus
        cpus_of_shared[home] += server.cpus
    bundles: list[Bundle] = []
    if ranks is not None:
        # All alike, so that they are interchangeable.
        cpus = ranks.per_node * ranks.cpus + max(cpus_of_shared, default=0.0)
        bundles = [Bundle(cpus, room)] * ranks.nodes
    first = len(bundles) + len(own)
    slots_of_players = [
        Slot(first + number, tuple(range(player.gpus))) for number, player in enumerate(players)
    ]
    return ClusterLayout(
        (*bundles, *own, *(Bundle(*player) for player in players)),
        () if ranks is None else _slots_of_ranks(ranks),
        tuple(slots_of_servers),
        tuple(slots_of_players),
    )


def _slots_of_ranks(ranks: RankNeeds) -> tuple[Slot, ...]:
    """One bundle a machine, whose GPUs the ranks share out in order."""
    return tuple(
        Slot(bundle, tuple(range(number * ranks.gpus, (number + 1) * ranks.gpus)))
        for bundle in range(ranks.nodes)
        for number in range(ranks.per_node)
    )


def described(bundles: Sequence[Bundle]) -> str:
    """The bundles in words: `2 x (4 CPUs, 4 GPUs) + 1 CPU`."""
    counts: dict[Bundle, int] = {}
    for bundle in bundles:
        counts[bundle] = counts.get(bundle, 0) + 1
    parts = [(count, _resources(bundle)) for bundle, count in counts.items()]
    if len(parts) == 1 and parts[0][0] == 1:
        return parts[0][1]
    return " + ".join(
        (f"{count} x " if count > 1 else "") + (f"({text})" if count > 1 or "," in text else text)
        for count, text in parts
    )


def _resources(bundle: Bundle) -> str:
    parts = [f"{bundle.cpus:g} CPU{'' if bundle.cpus == 1 else 's'}"]
    if bundle.gpus:
        parts.append(f"{bundle.gpus} GPU{'' if bundle.gpus == 1 else 's'}")
    if bundle.memory:
        parts.append(f"{bundle.memory / 1e9:.3g} GB of memory")
    return ", ".join(parts)


def _place_key(
    place: PlacedBundle, driver_node: str
) -> tuple[bool, tuple[int, int, str], str, list[tuple[int, int, str]]]:
    first = min(place.devices, key=_natural, default="")
    return place.node != driver_node, _address(place.host), place.node, _natural(first)


def _address(host: str) -> tuple[int, int, str]:
    """Addresses in the order of their numbers, names after them."""
    try:
        address = ip_address(host)
    except ValueError:
        return 9, 0, host
    return address.version, int(address), ""


def _natural(device: str) -> list[tuple[int, int, str]]:
    """Sorts `2` before `10`, and `GPU-...` by its text."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", device)]
