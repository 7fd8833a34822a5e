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
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import NamedTuple, TypeVar
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import size_of

AHEAD = 2
"""Buckets that a rank has sent, and that the driver is not through with (count)."""
KEPT = AHEAD + 1
"""Rooms that are filled again (count): of those, and the one that is filled meanwhile."""

_numbers = count()

Bytes = npt.NDArray[np.uint8]
R = TypeVar("R")


class Room:
    """Memory that can be sent. bytes_B: uint8. summed: whoever reads it on this side. number: no other's."""

    def __init__(self, num_bytes: int) -> None:
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("agentrl-bucket")
        finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, num_bytes)
        self.bytes_B = mapped(f"/proc/self/fd/{self.descriptor}", num_bytes, shared=True)
        self.summed: Future[list[int]] | None = None


class Free:
    """A few rooms that nobody looks at, to be filled again: memory that is new takes twice as long to fill.

    bucket_bytes: the least size of a room.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        # The smallest first.
        self._rooms: list[Room] = []

    def take(self, num_bytes: int) -> Room:
        """A room of so many bytes or more, the smallest there is."""
        room = next((room for room in self._rooms if len(room.bytes_B) >= num_bytes), None)
        if room is None:
            return Room(max(num_bytes, self.bucket_bytes))
        self._rooms.remove(room)
        if room.summed is not None:
            room.summed.result()
        return room

    def give_back(self, room: Room) -> None:
        """Nobody looks at it any more, but whoever sums it up."""
        self._rooms = sorted([*self._rooms, room], key=lambda one: len(one.bytes_B))[-KEPT:]


class Filled(NamedTuple):
    """A bucket in a room. free: where that goes when nobody looks."""

    tensors: tuple[TensorSpec, ...]
    room: Room
    free: Free


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
        return Bucket(said.tensors, mapped(f"/proc/self/fd/{descriptor}", num_bytes, shared=False).numpy())
    finally:
        os.close(descriptor)


def _answered(pipe: Connection, ahead: deque[Filled]) -> None:
    """Wait until the driver is through with the oldest; a room that somebody keeps is left to them."""
    oldest = ahead.popleft()
    if pipe.recv():
        oldest.free.give_back(oldest.room)


def mapped(path: str, num_bytes: int, *, shared: bool) -> Tensor:
    """uint8. shared: what is written there is seen by others.

    Unlike mmap's, such memory keeps no descriptor open: a sink may keep thousands of buckets.
    """
    return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)
