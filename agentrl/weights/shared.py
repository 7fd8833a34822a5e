"""Memory that several processes have mapped, for weights on their way.

A buffer has no name: it is opened through its descriptor, and when nobody has it mapped any more, it is gone,
whoever was killed.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from itertools import count
from weakref import finalize

import torch
from torch import Tensor

KEPT = 3
"""Buffers that are filled again (count): two at the receiver, and the one that is filled meanwhile."""

_numbers = count()


class SharedBuffer:
    """Memory that other processes can map.

    bytes_B: uint8. summed: whoever reads it on this side. number: no other's.
    """

    def __init__(self, num_bytes: int) -> None:
        self.number = next(_numbers)
        self.descriptor = os.memfd_create("agentrl-bucket")
        finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, num_bytes)
        self.bytes_B = mapped(f"/proc/self/fd/{self.descriptor}", num_bytes, shared=True)
        self.summed: Future[list[int]] | None = None


class BufferPool:
    """A few shared buffers that nobody looks at, to be filled again: new memory takes twice as long to fill.

    bucket_bytes: the least size of a buffer.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        # The smallest first.
        self._buffers: list[SharedBuffer] = []

    def take(self, num_bytes: int) -> SharedBuffer:
        """A buffer of so many bytes or more, the smallest there is."""
        found = next((one for one in self._buffers if len(one.bytes_B) >= num_bytes), None)
        if found is None:
            return SharedBuffer(max(num_bytes, self.bucket_bytes))
        self._buffers.remove(found)
        if found.summed is not None:
            found.summed.result()
        return found

    def give_back(self, buffer: SharedBuffer) -> None:
        """Nobody looks at it any more, but whoever sums it up."""
        self._buffers = sorted([*self._buffers, buffer], key=lambda one: len(one.bytes_B))[-KEPT:]


def mapped(path: str, num_bytes: int, *, shared: bool) -> Tensor:
    """uint8. shared: what is written there is seen by others.

    Unlike mmap's, such memory keeps no descriptor open: a sink may keep thousands of buckets.
    """
    return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)
