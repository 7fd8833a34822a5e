"""An actor of Ray: a process with an object of a class, and calls of its methods by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from agentrl.processes.hosted import BESIDE_THREADS

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )

_CONTROL, _CONCURRENT, _TOLD = "control", "concurrent", "told"
_THREADS = {_CONTROL: 1, _CONCURRENT: BESIDE_THREADS, _TOLD: 1}


class _Method(Protocol):
    def remote(self, *args: object) -> ObjectRef[object]: ...

    def options(self, *, concurrency_group: str) -> _Method: ...


class Actor:
    """Starts an object of `kind`, a class of a module, and takes no CPU of the cluster beyond its bundle's.

    name, namespace: under which Ray lists it; no other actor there has that name.

    num_gpus: those of its bundle that Ray shows it (count); 0 = Ray chooses none.

    Calls run one after the other, in their order; those with `concurrent` meanwhile, two at a time. Those
    with `control` take no time, and wait for none of them.
    """

    def __init__(
        self,
        kind: type[object],
        *args: object,
        name: str,
        namespace: str,
        strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy,
        num_gpus: int = 0,
    ) -> None:
        import ray

        remote = cast(Callable[..., Callable[[type[object]], _ActorClass]], ray.remote)
        options = {"num_gpus": num_gpus} if num_gpus else {}
        actor_class = remote(num_cpus=0, max_restarts=0, concurrency_groups=_THREADS, **options)(kind)
        named = actor_class.options(name=name, namespace=namespace, scheduling_strategy=strategy)
        self._handle = named.remote(*args)

    def call(self, method: str, *args: object) -> ObjectRef[object]:
        """Begin a call after all earlier ones. An argument that is a reference arrives as its value."""
        return self._method(method).remote(*args)

    def concurrent(self, method: str, *args: object) -> ObjectRef[object]:
        """Begin a call now, whatever the others do."""
        return self._method(method).options(concurrency_group=_CONCURRENT).remote(*args)

    def control(self, method: str, *args: object) -> ObjectRef[object]:
        """Begin a call now that takes no time."""
        return self._method(method).options(concurrency_group=_CONTROL).remote(*args)

    def told(self, method: str) -> ObjectRef[object]:
        """Begin a call now that waits for messages."""
        return self._method(method).options(concurrency_group=_TOLD).remote()

    def kill(self) -> None:
        """End the process, whatever it does; any thread may call this."""
        import ray

        ray.kill(self._handle)

    def _method(self, name: str) -> _Method:
        method: _Method = getattr(self._handle, name)
        return method


class _ActorClass(Protocol):
    def options(
        self,
        *,
        name: str,
        namespace: str,
        scheduling_strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy,
    ) -> _ActorClass: ...

    def remote(self, *args: object) -> ActorHandle[object]: ...


def in_bundle(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    """Has an actor start in a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Has an actor start on a machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)
