"""Buckets from rank 0 to the driver, in buffers that both have mapped.

A buffer has no name: its descriptor goes through the pipe's socket, and when nobody has it mapped any more,
it is gone, whoever was killed. The rank is at most two buckets ahead; for each the driver says, when it wants
the next, whether anybody still looks at it. If not, the rank fills the same buffer again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import size_of
from agentrl.weights.shared import POOL_SIZE, BufferPool, SharedBuffer, mapped

AHEAD = POOL_SIZE - 1
"""Buckets that a rank has sent, and that the driver is not through with (count)."""

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


class Filled(NamedTuple):
    """A bucket in a shared buffer. pool: where that goes when nobody looks."""

    tensors: tuple[TensorSpec, ...]
    buffer: SharedBuffer
    pool: BufferPool


def bucket_of(filled: Filled) -> Bucket:
    """The bucket, as this process sees its bytes."""
    num_bytes = sum(map(size_of, filled.tensors))
    return Bucket(filled.tensors, filled.buffer.bytes_B[:num_bytes].numpy())


class Announced(NamedTuple):
    """A rank announces a bucket; the descriptor of its bytes follows."""

    tensors: tuple[TensorSpec, ...]


def send_buckets(pipe: Connection, filled: Generator[Filled, None, R]) -> R:
    """Send what is filled, never too far ahead; what the generator returns.

    Raises:
        EOFError: the driver is gone.
    """
    ahead: deque[Filled] = deque()
    while True:
        try:
            one = next(filled)
        except StopIteration as end:
            returned: R = end.value
            break
        pipe.send(Announced(one.tensors))
        send_handle(pipe, one.buffer.descriptor, None)
        ahead.append(one)
        if len(ahead) == AHEAD:
            _answered(pipe, ahead)
    while ahead:
        _answered(pipe, ahead)
    return returned


def received(pipe: Connection) -> object:
    """What a rank says; where that is a bucket, with its bytes mapped for as long as its array lives.

    Raises:
        EOFError: the rank is gone.
    """
    said = pipe.recv()
    if not isinstance(said, Announced):
        return said
    descriptor = recv_handle(pipe)
    try:
        num_bytes = sum(map(size_of, said.tensors))
        return Bucket(said.tensors, mapped(f"/proc/self/fd/{descriptor}", num_bytes, shared=False).numpy())
    finally:
        os.close(descriptor)


def _answered(pipe: Connection, ahead: deque[Filled]) -> None:
    """Wait until the driver is through with the oldest; a buffer that somebody keeps is left to them."""
    oldest = ahead.popleft()
    if pipe.recv():
        oldest.pool.give_back(oldest.buffer)
