"""Snapshots of the weights, in the driver: how they are made, and how memory on a device is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from agentrl.trainer.launch.device_weights import DeviceSnapshot, DeviceStore
from agentrl.trainer.launch.rank_plan import RankPlan
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.plan import Worker
from agentrl.types.seams import Bucket, Snapshot, TensorSpec

P = ParamSpec("P")
Q = ParamSpec("Q")
W = TypeVar("W")
R = TypeVar("R")


class Ranks(Protocol):
    """The ranks of a plan, in processes of their own or in this one. Its calls block."""

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of the ranks."""

    @property
    def where(self) -> list[str]:
        """Their processes and machines, in the order of the ranks; it does not wait to know them."""

    def imported(self) -> None:
        """Wait until every rank has imported its worker; nothing is on a GPU yet. Raises as `call`."""

    def begin(self, plan: RankPlan) -> None:
        """Send every rank a plan; the worker of the previous plan is closed.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """

    def call(self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of every rank's `Worker`, by its name; the replies, in the order of the ranks."""

    def stream(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Generator[Bucket, None, R]:
        """Buckets of rank 0, one at a time, to their end; returns what the method of rank 0 returned."""

    def snapshot(
        self,
        method: Callable[Concatenate[W, P], Generator[Filled, None, int]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Snapshot:
        """All buckets that `stream` would give, whose checksum the method of rank 0 returns."""

    async def run(self, function: Callable[Q, R], *args: Q.args, **kwargs: Q.kwargs) -> R:
        """Run a function that makes such calls, off the event loop where the ranks are processes."""

    def end(self) -> None:
        """End all ranks at once, in the middle of a call, too; any thread may call this."""

    def close(self) -> None:
        """End all ranks."""


async def called(
    ranks: Ranks, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """`Ranks.call`, off the event loop."""
    return await ranks.run(lambda: ranks.call(method, *args, **kwargs))


_freed: WeakKeyDictionary[Ranks, list[int]] = WeakKeyDictionary()
"""Versions on the device of rank 0 that nobody needs. A snapshot may outlive the trainer of its plan."""


class Snapshots:
    """Of the weights of some ranks. streaming: held while no other call may take the ranks' replies."""

    def __init__(self, ranks: Ranks, streaming: asyncio.Lock) -> None:
        self._ranks, self._streaming = ranks, streaming

    async def take(self, manifest: Sequence[TensorSpec], bucket_bytes: int, *, on_device: bool) -> Snapshot:
        """The current weights: in memory of rank 0's device, if that may be and it has such.

        Raises:
            TrainerError: a rank failed.
        """
        async with self._streaming:
            facts = None
            if on_device:
                facts = (await called(self._ranks, Worker.weights_on_device, manifest, bucket_bytes))[0]
            if facts is None:
                ranks = self._ranks
                return await ranks.run(lambda: ranks.snapshot(Worker.weights, manifest, bucket_bytes))
        copy, process = partial(self._copied, bucket_bytes), self._ranks.where[0]
        return DeviceSnapshot(facts, process=process, copy=copy, freed=self._freed)

    async def give_back(self, snapshot: Snapshot, *, keeps_memory: bool) -> None:
        """Have rank 0 free the versions on its device that nobody needs.

        keeps_memory: `snapshot` may stay there; else it moves to the host's memory.

        Raises:
            TrainerError: a rank failed.
        """
        async with self._streaming:
            numbers, self._freed[:] = tuple(self._freed), []
            if numbers:
                await called(self._ranks, DeviceStore.free_weights, numbers)
            if not keeps_memory and isinstance(snapshot, DeviceSnapshot) and snapshot.number not in numbers:
                snapshot.device = None
                await called(self._ranks, DeviceStore.settle_weights, snapshot.number)

    @property
    def _freed(self) -> list[int]:
        return _freed.setdefault(self._ranks, [])

    async def _copied(self, bucket_bytes: int, number: int) -> Snapshot:
        """A version on the device of rank 0, copied to the host's memory."""
        async with self._streaming:
            ranks = self._ranks
            return await ranks.run(lambda: ranks.snapshot(DeviceStore.copied_weights, number, bucket_bytes))
