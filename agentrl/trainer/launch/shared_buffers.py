"""Buckets from rank 0 to the driver, in shared memory that both have mapped.

A buffer has no name: the driver opens it through the rank's descriptor, which other users may not, and the
kernel frees it when no process maps it any more, also after a kill. The rank is at most two buckets ahead.
When the driver takes the next bucket, it reports whether the one before is still referenced; if not, the rank
fills that buffer again.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import size_of
from agentrl.weights.shared import POOL_SIZE, BufferPool, SharedBuffer, SharedFile, mapped

AHEAD = POOL_SIZE - 1
"""Buckets that a rank has sent and the driver has not acknowledged (count)."""

Bytes = npt.NDArray[np.uint8]


class Filled(NamedTuple):
    """A bucket in a shared buffer. pool: where the buffer returns when nothing references the bucket."""

    tensors: tuple[TensorSpec, ...]
    buffer: SharedBuffer
    pool: BufferPool


class SharedBytes(NamedTuple):
    """Memory of another process of this machine, which others open at `path` as long as it keeps that."""

    path: str
    num_bytes: int


def bucket_of(filled: Filled) -> Bucket:
    """The bucket, over this process's mapping of its bytes."""
    num_bytes = sum(map(size_of, filled.tensors))
    return Bucket(filled.tensors, filled.buffer.bytes_B[:num_bytes].numpy(), filled.buffer)


def received(tensors: tuple[TensorSpec, ...], data: SharedBytes | Bytes) -> Bucket:
    """A bucket that a rank has sent; what it shares is mapped for as long as the array exists."""
    if not isinstance(data, SharedBytes):
        return Bucket(tensors, data)
    file = SharedFile(os.open(data.path, os.O_RDWR | os.O_CLOEXEC))
    return Bucket(tensors, mapped(file.path, data.num_bytes, shared=False).numpy(), file)
