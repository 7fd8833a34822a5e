"""A whole version on its way into a sink."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from agentrl.protocols import WeightSink
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets

_BUCKET_BYTES = 64 << 20


async def deliver(named: Sequence[tuple[str, Tensor]], sink: WeightSink, version: int) -> int:
    """Send all tensors as `version`, in buckets of 64 MiB; gives the bytes that were sent.

    Raises:
        EngineError: the sink did not take them; the old version serves on.
    """
    num_bytes = 0
    async with sink.begin(manifest_of(named), version) as transaction:
        for bucket in pack_buckets(named, _BUCKET_BYTES):
            num_bytes += bucket.data.nbytes
            await transaction.put(bucket)
        await transaction.commit(checksum(named))
    return num_bytes
