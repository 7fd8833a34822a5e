"""Buckets from rank 0 to the driver, through memory that both have mapped.

A room has no name: its descriptor goes through the pipe's socket, and when nobody has it mapped any more, it
is gone, whoever was killed. The rank is at most two buckets ahead; for each the driver says, when it wants
the next, whether anybody still looks at it. If not, the rank fills the same room again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple, TypeVar
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import dtype_named, size_of

AHEAD = 2
"""Buckets that a rank has sent, and that the driver is not through with (count)."""

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


class Room:
    """Memory that can be sent. bytes_B: uint8. summed: whoever reads it on this side."""

    def __init__(self, num_bytes: int) -> None:
        self.descriptor = os.memfd_create("agentrl-bucket")
        finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, num_bytes)
        self.bytes_B = _mapped(self.descriptor, num_bytes, shared=True)
        self.summed: Future[list[int]] | None = None

    def at(self, offset: int, spec: TensorSpec) -> Tensor:
        """The place of a tensor that begins so many bytes in."""
        flat_B = self.bytes_B[offset : offset + size_of(spec)]
        return flat_B.view(dtype_named(spec.dtype)).view(spec.shape)


class Filled(NamedTuple):
    """A bucket in a room. free: rooms that can be filled again; this one joins them when nobody looks."""

    tensors: tuple[TensorSpec, ...]
    room: Room
    free: list[Room]


class Part(NamedTuple):
    """A rank announces a bucket; the descriptor of its bytes follows."""

    tensors: tuple[TensorSpec, ...]


def sent(pipe: Connection, filled: Generator[Filled, None, R]) -> R:
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
        pipe.send(Part(one.tensors))
        send_handle(pipe, one.room.descriptor, None)
        ahead.append(one)
        if len(ahead) == AHEAD:
            _answered(pipe, ahead)
    while ahead:
        _answered(pipe, ahead)
    return returned


def heard(pipe: Connection) -> object:
    """What a rank says; where that is a bucket, with its bytes mapped for as long as its array lives.

    Raises:
        EOFError: the rank is gone.
    """
    said = pipe.recv()
    if not isinstance(said, Part):
        return said
    descriptor = recv_handle(pipe)
    try:
        num_bytes = sum(map(size_of, said.tensors))
        return Bucket(said.tensors, _mapped(descriptor, num_bytes, shared=False).numpy())
    finally:
        os.close(descriptor)


def _answered(pipe: Connection, ahead: deque[Filled]) -> None:
    """Wait until the driver is through with the oldest; a room that somebody keeps is left to them."""
    oldest = ahead.popleft()
    if pipe.recv():
        oldest.free.append(oldest.room)


def _mapped(descriptor: int, num_bytes: int, *, shared: bool) -> Tensor:
    """uint8. shared: what is written there is seen by others.

    Unlike mmap's, such memory keeps no descriptor open: a sink may keep thousands of buckets.
    """
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)
