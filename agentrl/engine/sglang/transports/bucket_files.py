"""A bucket as a file that a loader maps: functions that run in the process that has the bucket."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl.errors import EngineError
from agentrl.types import JSON
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.checksum import BucketChecksums, bucket_checksums, digest, digests_of
from agentrl.weights.codec import size_of, slices, torch_dtype

_ALIGNMENT = 64


class BucketFile(NamedTuple):
    """A file with a bucket. path: for any process of this user on this machine.

    tensors: name, shape, dtype and offset of each. digests: of its tensors, read from the file; None = it is
    the memory of the bucket itself, and was not read. crcs: of its tensors, if they are asked for.
    """

    path: str
    tensors: JSON
    digests: list[int] | None
    crcs: dict[str, int]


def in_memory(with_crcs: bool, buckets: Sequence[Bucket]) -> list[BucketFile | None]:
    """The memory of each bucket as a file; None = it has none that a loader can map."""
    return [_memory_of(bucket, with_crcs) for bucket in buckets]


def _memory_of(bucket: Bucket, with_crcs: bool) -> BucketFile | None:
    if bucket.file is None or not len(bucket.data):
        return None
    starts, _ = _offsets(bucket.tensors, 1)
    sizes = [torch_dtype(spec.dtype).itemsize for spec in bucket.tensors]
    if any(start % size for start, size in zip(starts, sizes, strict=True)):
        return None
    crcs = bucket_checksums([bucket]).crcs if with_crcs else {}
    return BucketFile(bucket.file.path, _described(bucket.tensors, 1), None, crcs)


def copy_of(path: Path, number: int, with_crcs: bool, buckets: Sequence[Bucket]) -> BucketFile:
    """Write a bucket's tensors to a file, and compute checksums of what the file then holds.

    Raises:
        EngineError: the file system is full.
    """
    tensors, specs = write_bucket(path, number, buckets), buckets[number].tensors
    data, (starts, _) = np.memmap(path, np.uint8, mode="r"), _offsets(specs, _ALIGNMENT)
    written = [(spec, data[start : start + size_of(spec)]) for spec, start in zip(specs, starts, strict=True)]
    crcs = {spec.name: zlib.crc32(held.data) for spec, held in written} if with_crcs else {}
    return BucketFile(str(path), tensors, [digest(spec, held) for spec, held in written], crcs)


def checksums_of(number: int, buckets: Sequence[Bucket]) -> BucketChecksums:
    """Both checksums of a bucket."""
    return bucket_checksums([buckets[number]])


def bucket_digests(number: int, buckets: Sequence[Bucket]) -> list[int]:
    """The digests of a bucket's tensors."""
    return digests_of(buckets[number])


def write_bucket(path: Path, number: int, buckets: Sequence[Bucket]) -> JSON:
    """Write a bucket's tensors, aligned; returns name, shape, dtype and offset of each.

    Raises:
        EngineError: the file system is full.
    """
    starts, end = _offsets(buckets[number].tensors, _ALIGNMENT)
    try:
        with path.open("wb", buffering=0) as file:
            for (_, data), start in zip(slices(buckets[number]), starts, strict=True):
                file.seek(start)
                remaining = data.data
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            # The file has at least one block: an empty file cannot be mapped.
            file.truncate(max(end, _ALIGNMENT))
    except OSError as error:
        raise EngineError(
            f"{path.parent} is too full for a bucket ({error.strerror}); send smaller ones."
        ) from error
    return _described(buckets[number].tensors, _ALIGNMENT)


def _offsets(tensors: Sequence[TensorSpec], alignment: int) -> tuple[list[int], int]:
    """Where each tensor begins in a file, and the end of the file, aligned."""
    starts, end = [], 0
    for spec in tensors:
        starts.append(end)
        end = -(-(end + size_of(spec)) // alignment) * alignment
    return starts, end


def _described(tensors: Sequence[TensorSpec], alignment: int) -> JSON:
    """Name, shape, dtype and offset of each tensor, as the loader reads them."""
    starts, _ = _offsets(tensors, alignment)
    return [
        [spec.name, list(spec.shape), spec.dtype, start] for spec, start in zip(tensors, starts, strict=True)
    ]
