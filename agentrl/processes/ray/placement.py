"""A layout's bundles, reserved in a Ray cluster: all of them, or none."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, RemoteError
from agentrl.processes.placement import Allocation, Bundle, ClusterLayout, PlacedBundle, described
from agentrl.processes.ray.actor import in_bundle
from agentrl.processes.ray.session import RaySession
from agentrl.runtime.event_loop import raise_if_cancelled
from agentrl.runtime.stage import summary_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_WAIT_S = 1.0
_PROBE_S = 300.0


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """Reserved bundles, until this process disconnects. ranks, servers, players: where each of them runs."""

    group: PlacementGroup
    ranks: Sequence[Allocation]
    servers: Sequence[Allocation]
    players: Sequence[Allocation] = ()

    def remove(self) -> None:
        """Free the bundles; whatever still runs in them is killed."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)


def placed(session: RaySession, layout: ClusterLayout, timeout_s: float) -> RayPlacement:
    """Reserve the bundles of a layout, packed onto as few machines as hold them.

    waits for: room in the cluster. unblocked by: that, or timeout_s.

    Raises:
        ConfigError: the cluster has no room for them, or got none in time; agentrl is missing on a machine.
        RemoteError: a machine was lost meanwhile.
        CancelledError: the task that waits was cancelled.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    if session.is_own and not _fits(layout.bundles, session.nodes()):
        # Waiting helps only where a cluster grows, or others leave it.
        raise ConfigError(_unplaceable(session, layout, "it has"))
    resources = [_resources(bundle) for bundle in layout.bundles]
    group = placement_group(resources, strategy="PACK", name=f"{session.title} ({session.namespace})")
    with ExitStack() as undo:
        undo.callback(remove_placement_group, group)
        if not _has_room(group, timeout_s):
            raise ConfigError(
                _unplaceable(session, layout, f"after {timeout_s:g} s it still has no room: it has")
            )
        placement = RayPlacement(group, *layout.allocations(_where(group, layout.bundles), session.node))
        undo.pop_all()
    return placement


def _has_room(group: PlacementGroup, timeout_s: float) -> bool:
    """Whether the cluster gets room for a group in time."""
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        # In a wait of Ray no signal is handled.
        if group.wait(min(left_s, _WAIT_S)):
            return True
        raise_if_cancelled()
    return False


def _resources(bundle: Bundle) -> dict[str, float]:
    needed = {"CPU": bundle.cpus, "GPU": bundle.gpus, "memory": bundle.memory}
    return {name: amount for name, amount in needed.items() if amount}


def _fits(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Whether the one machine of a Ray of this run's own holds all bundles."""
    (node,) = nodes
    total = Bundle(*(sum(amounts) for amounts in zip(*bundles, strict=True)))
    return all(amount <= node.get(name, 0) for name, amount in _resources(total).items())


def _unplaceable(session: RaySession, layout: ClusterLayout, has: str) -> str:
    asks_for_memory = any(bundle.memory for bundle in layout.bundles)
    nodes = [
        Bundle(node.get("CPU", 0), int(node.get("GPU", 0)), int(asks_for_memory and node.get("memory", 0)))
        for node in session.nodes()
    ]
    kinds = {"rank": layout.ranks, "server": layout.servers, "player": layout.players}
    taking = [
        f"num_cpus_per_{'rollout_worker' if kind == 'player' else kind}" for kind, of in kinds.items() if of
    ]
    fewer = " or ".join(f"{kind}s" for kind, of in kinds.items() if of)
    advice = f"add machines, lower {' or '.join(taking)}, or take fewer {fewer}"
    return (
        f"the Ray cluster cannot place this run: it asks for {described(layout.bundles)}, each part of that "
        f"on one machine, and {has} {described(nodes) or 'no machine'}; {advice}."
    )


def _where(group: PlacementGroup, bundles: Sequence[Bundle]) -> list[PlacedBundle]:
    """Where each bundle is; the GPUs of those that have any, as a process there sees them."""
    import ray
    from ray.util.placement_group import placement_group_table

    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    devices = _devices(group, [number for number, bundle in enumerate(bundles) if bundle.gpus], bundles)
    return [
        PlacedBundle(nodes[number], hosts[nodes[number]], devices.get(number, ()))
        for number in range(len(bundles))
    ]


def _devices(
    group: PlacementGroup, numbers: Sequence[int], bundles: Sequence[Bundle]
) -> dict[int, tuple[str, ...]]:
    """The GPUs of these bundles, in the form of CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: agentrl cannot be imported on a machine.
        RemoteError: a machine was lost, or starts no process.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    probe = ray.remote(_visible_devices)
    probes = [
        probe.options(num_cpus=0, num_gpus=bundles[number].gpus, scheduling_strategy=in_bundle(group, number))
        for number in numbers
    ]
    try:
        found = ray.get([start.remote() for start in probes], timeout=_PROBE_S)
    except RayTaskError as error:
        raise ConfigError(
            f"a machine of the cluster cannot run agentrl ({summary_of(error.cause or error)}); install the "
            "same Python, the same packages and the same agentrl on each."
        ) from error
    except RayError as error:
        raise RemoteError(f"a machine of the cluster did not say which GPUs it has: {error}") from error
    return dict(zip(numbers, found, strict=True))


def _visible_devices() -> tuple[str, ...]:
    """The GPUs that Ray has given this process."""
    import ray

    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])
