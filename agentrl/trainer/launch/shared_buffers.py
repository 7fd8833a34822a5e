"""Buckets from rank 0 to the driver, in shared memory that both have mapped.

A buffer has no name: its descriptor is sent over the pipe's socket, and the kernel frees it when no process
maps it any more, also after a kill. The rank is at most two buckets ahead. When the driver takes the next
bucket, it reports whether the one before is still referenced; if not, the rank fills that buffer again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import size_of
from agentrl.weights.shared import POOL_SIZE, BufferPool, SharedBuffer, SharedFile, mapped

AHEAD = POOL_SIZE - 1
"""Buckets that a rank has sent and the driver has not acknowledged (count)."""

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


class Filled(NamedTuple):
    """A bucket in a shared buffer. pool: where the buffer returns when nothing references the bucket."""

    tensors: tuple[TensorSpec, ...]
    buffer: SharedBuffer
    pool: BufferPool


def bucket_of(filled: Filled) -> Bucket:
    """The bucket, over this process's mapping of its bytes."""
    num_bytes = sum(map(size_of, filled.tensors))
    return Bucket(filled.tensors, filled.buffer.bytes_B[:num_bytes].numpy(), filled.buffer)


class BucketHeader(NamedTuple):
    """The message before a bucket; the descriptor of its bytes follows."""

    tensors: tuple[TensorSpec, ...]


def send_buckets(pipe: Connection, filled: Generator[Filled, None, R]) -> R:
    """Send the buckets, at most AHEAD of them unacknowledged; returns what the generator returns.

    Raises:
        EOFError: the driver has closed the pipe.
    """
    unacknowledged: deque[Filled] = deque()
    while True:
        try:
            bucket = next(filled)
        except StopIteration as end:
            returned: R = end.value
            break
        pipe.send(BucketHeader(bucket.tensors))
        send_handle(pipe, bucket.buffer.descriptor, None)
        unacknowledged.append(bucket)
        if len(unacknowledged) == AHEAD:
            _await_acknowledgement(pipe, unacknowledged)
    while unacknowledged:
        _await_acknowledgement(pipe, unacknowledged)
    return returned


def receive(pipe: Connection) -> object:
    """The next message of a rank; a bucket comes with its bytes mapped for as long as its array exists.

    Raises:
        EOFError: the rank has closed the pipe.
    """
    message = pipe.recv()
    if not isinstance(message, BucketHeader):
        return message
    file = SharedFile(recv_handle(pipe))
    num_bytes = sum(map(size_of, message.tensors))
    data = mapped(f"/proc/self/fd/{file.descriptor}", num_bytes, shared=False).numpy()
    return Bucket(message.tensors, data, file)


def _await_acknowledgement(pipe: Connection, ahead: deque[Filled]) -> None:
    """Wait until the driver acknowledges the oldest; a buffer that it still references is not reused."""
    oldest = ahead.popleft()
    if pipe.recv():
        oldest.pool.give_back(oldest.buffer)
