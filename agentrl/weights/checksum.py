"""One number for a set of named tensors: equal on both ends exactly when the same weights arrived."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import NamedTensors, bytes_of, manifest_of, slices

_THREADS = min(os.cpu_count() or 1, 4)
_WORTH_A_THREAD = 1 << 20


def checksum(named_tensors: NamedTensors) -> int:
    """64 bits over name, dtype, shape and bytes of every tensor, whatever their order.

    Each tensor's CRC-32 is hashed together with what the tensor is called before the digests
    are added up. CRCs alone are linear: two tensors of one shape could trade their contents
    without a trace.
    """
    named = ((manifest_of([(name, tensor)])[0], bytes_of(tensor)) for name, tensor in named_tensors)
    return added_up(_digests(named))


def digest(spec: TensorSpec, crc: int) -> int:
    """What one tensor adds to a checksum. crc: CRC-32 of its bytes."""
    told = f"{spec.name}\0{spec.dtype}\0{tuple(spec.shape)}\0{crc}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")


def added_up(digests: Iterable[int]) -> int:
    """The checksum of the tensors that have these digests."""
    return sum(digests) % 2**64


def digests_of(bucket: Bucket) -> list[int]:
    """What the tensors of a bucket add to a checksum, each.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    return list(_digests(slices(bucket)))


def _digests(named: Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]]) -> Iterator[int]:
    """Large tensors on several threads, as many of them at a time: a CRC lets other threads run."""
    running: deque[Future[int]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for spec, data in named:
            if data.nbytes < _WORTH_A_THREAD:
                yield _digest(spec, data)
                continue
            running.append(threads.submit(_digest, spec, data))
            if len(running) > _THREADS:
                yield running.popleft().result()
        yield from (found.result() for found in running)


def _digest(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> int:
    return digest(spec, zlib.crc32(data.data))
