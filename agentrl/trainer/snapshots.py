"""How the weights of ranks go out: as a snapshot in the memory of rank 0, or as a stream of buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

from agentrl.errors import DivergedError
from agentrl.trainer.launch.cast_weights import Cast
from agentrl.trainer.launch.device_weights import DeviceSnapshot, DeviceStore
from agentrl.trainer.launch.rank_plan import RankPlan
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.plan import Worker
from agentrl.types.seams import AdapterSink, Bucket, Snapshot, SnapshotSink, TensorSpec, WeightSink
from agentrl.weights.codec import non_finite, size_of, views
from agentrl.weights.hf.quantized import quantized_model

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

    async def take(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None, *, on_device: bool
    ) -> Snapshot:
        """The current weights: in memory of rank 0's device, if that may be and it has such.

        Raises:
            TrainerError: a rank failed.
        """
        async with self._streaming:
            facts = None
            if on_device:
                facts = (await called(self._ranks, Worker.weights_on_device, manifest, bucket_bytes, cast))[0]
            if facts is None:
                ranks = self._ranks
                return await ranks.run(lambda: ranks.snapshot(Worker.weights, manifest, bucket_bytes, cast))
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


BUCKET_BYTES = 64 << 20
_MAX_BUCKETS = 256  # of a snapshot


class Publisher:
    """Sends the weights of ranks that have their model.

    bucket_bytes: size of a bucket of weights; a larger tensor has a bucket of its own. streaming: held while
    ranks send buckets: a call between two of them would take their replies. model: the directory that engines
    began with, too: where it is quantized, weights are cast likewise as they are published.

    Raises:
        ModelLoadError: it is quantized in a way that is not read here.
    """

    def __init__(self, ranks: Ranks, bucket_bytes: int, streaming: asyncio.Lock, model: str) -> None:
        self._ranks, self._bucket_bytes, self._streaming = ranks, bucket_bytes, streaming
        self._quantized = quantized_model(model)
        self._snapshots = Snapshots(ranks, streaming)
        self.manifest = ranks.call(Worker.manifest)[0]
        """The tensors of the policy."""
        self.adapters = ranks.call(Worker.adapters)[0]
        """Those of its adapters alone; it may have none."""

    async def publish(self, target: WeightSink, version: int, *, keeps_memory: Callable[[], bool]) -> int:
        """Send the current weights; returns their bytes. keeps_memory: whether that of a snapshot
        stays for the next one, asked when it is given back.

        Raises:
            DivergedError: a weight is not a finite number.
            EngineError: the sink rejected them.
            TrainerError: a rank failed.
        """
        if isinstance(target, SnapshotSink):
            return await self._hand_over(target, version, keeps_memory=keeps_memory)
        async with self._streaming:
            return await self._send(target, version)

    def buckets(
        self, manifest: Sequence[TensorSpec] | None = None, cast: Cast | None = None
    ) -> ReceivedWeights:
        """The weights as a stream. manifest: `adapters`; None = all of them. cast: None = as they are."""
        chosen = self.manifest if manifest is None else manifest
        return ReceivedWeights(self._ranks.stream(Worker.weights, chosen, self._bucket_bytes, cast))

    def _cast(self, *, is_rounded: bool) -> Cast | None:
        return None if self._quantized is None else Cast(self._quantized, is_rounded)

    async def _hand_over(
        self, target: SnapshotSink, version: int, *, keeps_memory: Callable[[], bool]
    ) -> int:
        """Have the sink send a snapshot; returns its bytes."""
        takes_adapters = isinstance(target, AdapterSink) and target.takes_adapters
        manifest = self.adapters if takes_adapters else self.manifest
        num_bytes = sum(map(size_of, manifest))
        # Each has a descriptor, and a process has few of these.
        bucket_bytes = max(self._bucket_bytes, num_bytes // _MAX_BUCKETS)
        cast = None if takes_adapters else self._cast(is_rounded=False)
        take = self._snapshots.take(manifest, bucket_bytes, cast, on_device=target.takes_device_memory)
        snapshot = await take
        parts = snapshot.parts
        try:
            _check_finite(snapshot.not_finite)
            await target.load(snapshot, version)
        finally:
            # A call that is cancelled may have reached its end.
            if not target.holds(snapshot):
                snapshot.free()
            await self._snapshots.give_back(snapshot, keeps_memory=keeps_memory())
        return sum(size_of(spec) for part in parts for spec in part)

    async def _send(self, target: WeightSink, version: int) -> int:
        """Stream all buckets to the sink; returns their bytes."""
        # These compute with the weights as they come.
        num_bytes, buckets = 0, self.buckets(cast=self._cast(is_rounded=True))
        try:
            async with target.begin(self.manifest, version) as transaction:
                while (bucket := await self._ranks.run(_next_finite, buckets)) is not None:
                    num_bytes += bucket.data.nbytes
                    await transaction.put(bucket)
                    # A buffer that the sink does not reference is filled again.
                    del bucket
                await transaction.commit(buckets.checksum)
        finally:
            # When the engine has failed, the ranks are still sending.
            await self._ranks.run(buckets.drain)
        return num_bytes


def _next_finite(buckets: ReceivedWeights) -> Bucket | None:
    """The next bucket, whose numbers are all finite; None = there is no other."""
    bucket = next(buckets, None)
    _check_finite(None if bucket is None else non_finite(views(bucket)))
    return bucket


def _check_finite(name: str | None) -> None:
    """name: of a tensor that holds other numbers than finite ones; None = there is none."""
    if name is not None:
        raise DivergedError(
            f"training has diverged: after an update {name} holds weights that are not finite numbers, and "
            "nothing was sampled from them; resume from the last checkpoint with a lower lr, or, after a "
            "warm start, begin a new run with a lower warm_start_lr."
        )


class ReceivedWeights:
    """The weights in buckets, as they are received. checksum: of all tensors, once all are received."""

    def __init__(self, stream: Generator[Bucket, None, int]) -> None:
        self._stream = stream
        self.checksum = 0

    def __iter__(self) -> ReceivedWeights:
        return self

    def __next__(self) -> Bucket:
        try:
            return next(self._stream)
        except StopIteration as end:
            # A stream that had ended before returns None.
            self.checksum = end.value or self.checksum
            raise

    def drain(self) -> None:
        """Receive the remaining buckets, and discard them."""
        for _ in self:
            pass
