"""How ranks' weights go out: as a snapshot in the memory of rank 0, or as a stream of buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from agentrl.errors import DivergedError
from agentrl.trainer.plan import Worker
from agentrl.trainer.snapshots import Ranks, Snapshots
from agentrl.types.seams import Bucket, SnapshotSink, WeightSink
from agentrl.weights.codec import non_finite, size_of, views

BUCKET_BYTES = 64 << 20
_MAX_BUCKETS = 256  # of a snapshot


class Publisher:
    """Sends the weights of ranks that have their model.

    bucket_bytes: size of a bucket of weights; a larger tensor has a bucket of its own. streaming: held while
    ranks send buckets: a call between two of them would take their replies.
    """

    def __init__(self, ranks: Ranks, bucket_bytes: int, streaming: asyncio.Lock) -> None:
        self._ranks, self._bucket_bytes, self._streaming = ranks, bucket_bytes, streaming
        self._snapshots = Snapshots(ranks, streaming)
        self.manifest = ranks.call(Worker.manifest)[0]
        """The tensors of the policy."""

    async def publish(self, target: WeightSink, version: int, *, keeps_memory: bool) -> int:
        """Send the current weights; returns their bytes. keeps_memory: of a snapshot, for the next one.

        Raises:
            DivergedError: a weight is not a finite number.
            EngineError: the sink rejected them.
            TrainerError: a rank failed.
        """
        if isinstance(target, SnapshotSink):
            return await self._hand_over(target, version, keeps_memory=keeps_memory)
        async with self._streaming:
            return await self._send(target, version)

    def buckets(self) -> ReceivedWeights:
        """The weights as a stream."""
        return ReceivedWeights(self._ranks.stream(Worker.weights, self.manifest, self._bucket_bytes))

    async def _hand_over(self, target: SnapshotSink, version: int, *, keeps_memory: bool) -> int:
        """Have the sink send a snapshot; returns its bytes."""
        num_bytes = sum(map(size_of, self.manifest))
        # Each has a descriptor, and a process has few of these.
        bucket_bytes = max(self._bucket_bytes, num_bytes // _MAX_BUCKETS)
        take = self._snapshots.take(self.manifest, bucket_bytes, on_device=target.takes_device_memory)
        snapshot = await take
        try:
            _check_finite(snapshot.not_finite)
            await target.load(snapshot, version)
        finally:
            # A call that is cancelled may have reached its end.
            if not target.holds(snapshot):
                snapshot.free()
            await self._snapshots.give_back(snapshot, keeps_memory=keeps_memory)
        return num_bytes

    async def _send(self, target: WeightSink, version: int) -> int:
        """Stream all buckets to the sink; returns their bytes."""
        num_bytes, buckets = 0, self.buckets()
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
