"""Ranks that write into a buffer of rank 0 directly: on CPUs, those that may open its descriptors.

All calls are collectives of all ranks. A buffer has no name; it is opened under /proc/PID/fd of the process
that made it, and the kernel frees it when no process maps it any more, also after a kill.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.trainer.megatron.device import compute_device
from agentrl.weights.shared import POOL_SIZE, BufferPool, SharedBuffer, mapped

_WORDS = 2


class _Location(NamedTuple):
    """The address of a buffer: a descriptor of process `pid`. number: of the buffer."""

    pid: int
    descriptor: int
    number: int
    num_bytes: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class LocalRanks:
    """The buffers of rank 0, mapped by this rank where it can.

    pool: on rank 0, the buffers to fill again. far: the ranks that cannot map them, and send their shards.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.pool = BufferPool(bucket_bytes)
        self._mapped: OrderedDict[int, Tensor] = OrderedDict()
        token = np.frombuffer(os.urandom(8 * _WORDS), np.uint8)
        probe = SharedBuffer(len(token))
        probe.bytes_B.numpy()[:] = token
        location = from_first([*_location_of(probe), *token.view(np.int64).tolist()])
        # From one GPU to another is the shorter way.
        can_map = compute_device().type == "cpu" and self._holds(
            _Location(*location[:-_WORDS]), location[-_WORDS:]
        )
        near = torch.tensor([can_map], device=compute_device())
        near_by_rank = [torch.empty_like(near) for _ in range(dist.get_world_size())]
        dist.all_gather(near_by_rank, near)
        # Rank 0 writes its own shards, wherever they are.
        others = enumerate(near_by_rank[1:], start=1)
        self.far = frozenset(rank for rank, is_near in others if not is_near.item())

    def open(self, buffer: SharedBuffer | None) -> Tensor | None:
        """The bytes of rank 0's buffer; None on a rank that cannot map it. buffer: on rank 0."""
        location = _Location(*from_first(_Location(0, 0, 0, 0) if buffer is None else _location_of(buffer)))
        if buffer is not None:
            return buffer.bytes_B
        return None if dist.get_rank() in self.far else self._map(location)

    def _map(self, location: _Location) -> Tensor:
        buffer = self._mapped.pop(location.number, None)
        if buffer is None:
            buffer = mapped(location.path, location.num_bytes, shared=True)
        self._mapped[location.number] = buffer
        # Rank 0 fills at most POOL_SIZE buffers again.
        if len(self._mapped) > POOL_SIZE:
            self._mapped.popitem(last=False)
        return buffer

    def _holds(self, location: _Location, words: list[int]) -> bool:
        """Whether the path holds the buffer of rank 0, and not a file of another machine's process."""
        try:
            status = os.stat(location.path)
        except OSError:
            return False
        # Opening a pipe would block.
        if not stat.S_ISREG(status.st_mode) or status.st_size != location.num_bytes:
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


def from_first(numbers: Sequence[int]) -> list[int]:
    """The numbers of rank 0, in every rank; all pass as many."""
    location = torch.tensor([*numbers], dtype=torch.int64, device=compute_device())
    dist.broadcast(location, 0)
    return [int(number) for number in location.tolist()]
