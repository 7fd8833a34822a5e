"""One number for a set of named tensors: equal on both ends exactly when the same weights arrived."""

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

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import NamedTensors, bytes_of, manifest_of, slices

_THREADS = min(os.cpu_count() or 1, 4)
_WORTH_A_THREAD = 1 << 20

_Found = TypeVar("_Found")
_Named = Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]]


def checksum(named_tensors: NamedTensors) -> int:
    """64 bits over name, dtype, shape and bytes of every tensor, whatever their order.

    The hash of each tensor's bytes (XXH3, 64 bits, as fast as memory) is hashed together with what the tensor
    is called before the digests are added up: two tensors of one shape that traded their contents show.
    """
    named = ((manifest_of([(name, tensor)])[0], bytes_of(tensor)) for name, tensor in named_tensors)
    return added_up(_in_threads(digest, named))


def digest(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> int:
    """What one tensor adds to a checksum. data: its bytes."""
    found = xxhash.xxh3_64_intdigest(data.data)
    told = f"{spec.name}\0{spec.dtype}\0{tuple(spec.shape)}\0{found}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")


def added_up(digests: Iterable[int]) -> int:
    """The checksum of the tensors that have these digests."""
    return sum(digests) % 2**64


def digests_of(bucket: Bucket) -> list[int]:
    """What the tensors of a bucket add to a checksum, each.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    return list(_in_threads(digest, slices(bucket)))


class Sent(NamedTuple):
    """What leads from a sender's checksum to a receiver that has only Python's own library.

    crcs: of each tensor's bytes, CRC-32, by name. checksum: of the same bytes.
    """

    crcs: dict[str, int]
    checksum: int


def sent_in(*buckets: Bucket) -> Sent:
    """All tensors of some buckets.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    both = list(_in_threads(_both, chain.from_iterable(map(slices, buckets))))
    return Sent({name: crc for name, crc, _ in both}, added_up(digest for _, _, digest in both))


def _both(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> tuple[str, int, int]:
    return spec.name, zlib.crc32(data.data), digest(spec, data)


def _in_threads(
    work: Callable[[TensorSpec, npt.NDArray[np.uint8]], _Found], named: _Named
) -> Iterator[_Found]:
    """Large tensors on several threads, as many of them at a time: hashing lets other threads run."""
    running: deque[Future[_Found]] = deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for spec, data in named:
            if data.nbytes < _WORTH_A_THREAD:
                yield work(spec, data)
                continue
            running.append(threads.submit(work, spec, data))
            if len(running) > _THREADS:
                yield running.popleft().result()
        yield from (found.result() for found in running)
