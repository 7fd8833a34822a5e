"""The checksum of a set of named tensors: equal on both ends exactly when the same weights arrived."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import NamedTensors, bytes_of, manifest_of, slices

_THREADS = min(os.cpu_count() or 1, 4)
_WORTH_A_THREAD = 1 << 20

_Result = TypeVar("_Result")
_TensorBytes = Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]]


def checksum(named_tensors: NamedTensors) -> int:
    """64 bits over name, dtype, shape and bytes of every tensor, in any order.

    The hash of each tensor's bytes (XXH3, 64 bits, as fast as memory) is hashed together with the tensor's
    name before the digests are added up: so two tensors of one shape with swapped contents change the sum.
    """
    tensors = ((manifest_of([(name, tensor)])[0], bytes_of(tensor)) for name, tensor in named_tensors)
    return sum_digests(_in_threads(digest, tensors))


def digest(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> int:
    """The summand of one tensor in a checksum. data: its bytes."""
    content_hash = xxhash.xxh3_64_intdigest(data.data)
    identity = f"{spec.name}\0{spec.dtype}\0{tuple(spec.shape)}\0{content_hash}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def sum_digests(digests: Iterable[int]) -> int:
    """The checksum of the tensors with these digests."""
    return sum(digests) % 2**64


def digests_of(bucket: Bucket) -> list[int]:
    """The digest of each tensor of a bucket.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    return list(_in_threads(digest, slices(bucket)))


class BucketChecksums(NamedTuple):
    """Two checksums of the same tensors; a receiver with only Python's standard library computes the CRCs.

    crcs: the CRC-32 of each tensor's bytes, by name. checksum: over all of them, as `checksum` computes it.
    """

    crcs: dict[str, int]
    checksum: int


def bucket_checksums(buckets: Iterable[Bucket]) -> BucketChecksums:
    """The checksums of all tensors in some buckets.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    rows = list(_in_threads(_crc_and_digest, chain.from_iterable(map(slices, buckets))))
    return BucketChecksums({name: crc for name, crc, _ in rows}, sum_digests(digest for _, _, digest in rows))


def _crc_and_digest(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> tuple[str, int, int]:
    return spec.name, zlib.crc32(data.data), digest(spec, data)


def _in_threads(
    work: Callable[[TensorSpec, npt.NDArray[np.uint8]], _Result], tensors: _TensorBytes
) -> Iterator[_Result]:
    """Results in any order; large tensors run on several threads, because hashing releases the GIL."""
    running: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for spec, data in tensors:
            if data.nbytes < _WORTH_A_THREAD:
                yield work(spec, data)
                continue
            running.append(threads.submit(work, spec, data))
            if len(running) > _THREADS:
                yield running.popleft().result()
        yield from (future.result() for future in running)
