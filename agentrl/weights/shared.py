"""Memory for the transfer of weights: shared between processes, and pinned between a GPU and the host.

A buffer has no name in the file system: another process opens it through its descriptor. The kernel frees it
with the last mapping, also where a process was killed.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from itertools import count
from weakref import finalize

import torch
from torch import Tensor

BUCKET_NAME = "agentrl-bucket"
"""The name of the memory, for whoever looks at it; no file has it."""

POOL_SIZE = 3
"""Buffers that a pool reuses (count): two at the receiver, and one that the sender fills meanwhile."""

IDLE_BYTES = 1 << 30
"""Of a snapshot that is freed, a pool keeps more of them: up to this size, all together."""

_numbers = count()


class SharedFile:
    """An open file in shared memory, which is closed with this object.

    path: where other processes of this user and this machine open it, as long as this object exists.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        finalize(self, os.close, descriptor)
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"


class SharedBuffer(SharedFile):
    """Memory that other processes can map.

    bytes_B: uint8. digests: of its tensors, while a thread of this process computes them. number: unique in
    this process.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(os.memfd_create(BUCKET_NAME))
        os.truncate(self.descriptor, num_bytes)
        self.number = next(_numbers)
        self.bytes_B = mapped(f"/proc/self/fd/{self.descriptor}", num_bytes, shared=True)
        self.digests: Future[list[int]] | None = None


class BufferPool:
    """A few unused shared buffers for reuse: filling new memory takes twice as long. Any thread may use it.

    bucket_bytes: the minimum size of a buffer.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        # Sorted by size, ascending.
        self._buffers: list[SharedBuffer] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> SharedBuffer:
        """The smallest unused buffer of at least `num_bytes`, or a new one."""
        with self._lock:
            buffer = next((buffer for buffer in self._buffers if len(buffer.bytes_B) >= num_bytes), None)
            if buffer is not None:
                self._buffers.remove(buffer)
        if buffer is None:
            return SharedBuffer(max(num_bytes, self.bucket_bytes))
        if buffer.digests is not None:
            buffer.digests.result()
        return buffer

    def give_back(self, buffer: SharedBuffer, *, idle_bytes: int = 0) -> None:
        """Return a buffer that no process reads any more; its digests may still be computed.

        idle_bytes: what all unused ones may hold; `POOL_SIZE` of them may hold more.
        """
        with self._lock:
            self._buffers = sorted([*self._buffers, buffer], key=lambda item: len(item.bytes_B))
            while len(self._buffers) > POOL_SIZE and sum(len(b.bytes_B) for b in self._buffers) > idle_bytes:
                del self._buffers[0]


def mapped(path: str, num_bytes: int, *, shared: bool) -> Tensor:
    """A file as a uint8 tensor. shared: writes are visible to other processes.

    Unlike mmap, this mapping keeps no descriptor open: a sink may hold thousands of buckets.
    """
    return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)


_PIECE_BYTES = 32 << 20


class HostCopy:
    """Copies bytes from a GPU at the rate of the bus, into memory that is not pinned.

    Pinning new memory takes longer than a copy, so two pinned pieces are allocated once: one is filled by the
    GPU while the other is read.
    """

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def copy(self, source_B: Tensor, target_B: Tensor) -> None:
        """Copy uint8 memory of any device to the host's; it has arrived when this returns."""
        if not source_B.is_cuda:
            target_B.copy_(source_B)
            return
        if not self._pieces:
            self._pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in self._pieces]
        starts = range(0, len(source_B), _PIECE_BYTES)
        for number, start in enumerate([*starts, None]):
            if start is not None:
                part_B = source_B[start : start + _PIECE_BYTES]
                self._pieces[number % 2][: len(part_B)].copy_(part_B, non_blocking=True)
                events[number % 2].record()
            if number:
                target_part_B = target_B[starts[number - 1] :][:_PIECE_BYTES]
                events[(number - 1) % 2].synchronize()
                target_part_B.copy_(self._pieces[(number - 1) % 2][: len(target_part_B)])
