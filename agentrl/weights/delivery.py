"""Sending one complete version of the weights to a sink."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from agentrl.types.seams import WeightSink
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets

_BUCKET_BYTES = 64 << 20


async def deliver(tensors: Sequence[tuple[str, Tensor]], sink: WeightSink, version: int) -> int:
    """Send all tensors as `version`, in buckets of 64 MiB; returns the number of bytes sent.

    Raises:
        EngineError: the sink rejected them; it keeps serving the old version.
    """
    num_bytes = 0
    async with sink.begin(manifest_of(tensors), version) as transaction:
        for bucket in pack_buckets(tensors, _BUCKET_BYTES):
            num_bytes += bucket.data.nbytes
            await transaction.put(bucket)
        await transaction.commit(checksum(tensors))
    return num_bytes
