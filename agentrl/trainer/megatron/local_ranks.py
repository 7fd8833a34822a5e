"""Ranks that write into a buffer of rank 0 themselves: those on its machine that may open what it has open.

All calls are collectives of all ranks. A buffer has no name; it is opened through the process that made it,
and when that is killed, it goes with the last that has it mapped.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.trainer.megatron.device import here
from agentrl.weights.shared import POOL_SIZE, BufferPool, SharedBuffer, mapped

_WORDS = 2


class _Location(NamedTuple):
    """Where a buffer is. pid, descriptor: whose, and which of its files. number: of the buffer."""

    pid: int
    descriptor: int
    number: int
    num_bytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class LocalRanks:
    """The buffers of rank 0, as one rank can reach them.

    pool: on rank 0, those that can be filled again. far: the ranks that cannot reach them, and have to send.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.pool = BufferPool(bucket_bytes)
        self._mapped: OrderedDict[int, Tensor] = OrderedDict()
        token = np.frombuffer(os.urandom(8 * _WORDS), np.uint8)
        probe = SharedBuffer(len(token))
        probe.bytes_B.numpy()[:] = token
        location = _broadcast([*_location_of(probe), *token.view(np.int64).tolist()])
        near = torch.tensor([self._holds(_Location(*location[:-_WORDS]), location[-_WORDS:])], device=here())
        found = [torch.empty_like(near) for _ in range(dist.get_world_size())]
        dist.all_gather(found, near)
        self.far = frozenset(rank for rank, one in enumerate(found) if not one.item())

    def open(self, buffer: SharedBuffer | None) -> Tensor | None:
        """The bytes of the buffer that rank 0 has; None on a rank that is far. buffer: on rank 0."""
        location = _Location(*_broadcast(_Location(0, 0, 0, 0) if buffer is None else _location_of(buffer)))
        if buffer is not None:
            return buffer.bytes_B
        return None if dist.get_rank() in self.far else self._reached(location)

    def _reached(self, location: _Location) -> Tensor:
        found = self._mapped.pop(location.number, None)
        if found is None:
            found = mapped(location.path, location.num_bytes, shared=True)
        self._mapped[location.number] = found
        # Rank 0 has no more that it fills again.
        if len(self._mapped) > POOL_SIZE:
            self._mapped.popitem(last=False)
        return found

    def _holds(self, location: _Location, words: list[int]) -> bool:
        """Whether what is open under that number is the buffer, and not what another machine has there."""
        try:
            found = os.stat(location.path)
        except OSError:
            return False
        # Whoever opened a pipe would wait.
        if not stat.S_ISREG(found.st_mode) or found.st_size != location.num_bytes:
            return False
        return _read(location) == words


def _read(location: _Location) -> list[int]:
    try:
        return [
            int(word) for word in mapped(location.path, location.num_bytes, shared=False).view(torch.int64)
        ]
    except RuntimeError:
        return []


def _location_of(buffer: SharedBuffer) -> _Location:
    return _Location(os.getpid(), buffer.descriptor, buffer.number, len(buffer.bytes_B))


def _broadcast(numbers: list[int] | _Location) -> list[int]:
    location = torch.tensor(numbers, dtype=torch.int64, device=here())
    dist.broadcast(location, 0)
    return [int(number) for number in location.tolist()]
