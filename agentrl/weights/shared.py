"""Shared memory for the transfer of weights between processes.

A buffer has no name in the file system: another process opens it through its descriptor. The kernel frees it
with the last mapping, also where a process was killed. One in /dev/shm can get a name for a while (`link`),
for processes that have no access to descriptors of this one.
"""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

SHARED = Path("/dev/shm")
"""The directory of shared memory files."""

POOL_SIZE = 3
"""Buffers that a pool reuses (count): two at the receiver, and one that the sender fills meanwhile."""

IDLE_BYTES = 1 << 30
"""A pool keeps more of them up to this size together: those of a snapshot of a small model."""

_ROOM_BYTES = 1 << 30
"""What stays free in /dev/shm for others, such as NCCL."""

_numbers = count()


class SharedFile:
    """An open file in shared memory, which is closed with this object. was_linked: it has had a name."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.was_linked = False
        finalize(self, os.close, descriptor)

    def link(self, path: Path) -> bool:
        """Give the file a name, in place of the file there; False where it cannot have one in that folder.

        It can have one once: the kernel gives none to a file that has lost its last one. It is locked from
        then on, as long as any process has it open through this object.
        """
        temporary = path.with_name(f"{path.name}.link")
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # With a folder given, Python follows the link to the descriptor; without one it does not.
            os.link(f"/proc/self/fd/{self.descriptor}", temporary, src_dir_fd=self.descriptor)
            temporary.replace(path)
        except OSError:
            return False
        self.was_linked = True
        return True


class SharedBuffer(SharedFile):
    """Memory that other processes can map.

    bytes_B: uint8. digests: of its tensors, while a thread of this process computes them. number: unique in
    this process.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(_without_name(num_bytes))
        self.number = next(_numbers)
        self.bytes_B = mapped(f"/proc/self/fd/{self.descriptor}", num_bytes, shared=True)
        self.digests: Future[list[int]] | None = None


class BufferPool:
    """A few unused shared buffers for reuse: filling new memory takes twice as long.

    bucket_bytes: the minimum size of a buffer.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        # Sorted by size, ascending.
        self._buffers: list[SharedBuffer] = []

    def take(self, num_bytes: int) -> SharedBuffer:
        """The smallest unused buffer of at least `num_bytes`, or a new one."""
        buffer = next((buffer for buffer in self._buffers if len(buffer.bytes_B) >= num_bytes), None)
        if buffer is None:
            return SharedBuffer(max(num_bytes, self.bucket_bytes))
        self._buffers.remove(buffer)
        if buffer.digests is not None:
            buffer.digests.result()
        return buffer

    def give_back(self, buffer: SharedBuffer) -> None:
        """Return a buffer that no process reads any more; its digests may still be computed."""
        self._buffers = sorted([*self._buffers, buffer], key=lambda item: len(item.bytes_B))
        while len(self._buffers) > POOL_SIZE and sum(len(b.bytes_B) for b in self._buffers) > IDLE_BYTES:
            del self._buffers[0]


def _without_name(num_bytes: int) -> int:
    """A new file in memory; its descriptor."""
    with suppress(OSError):
        status = os.statvfs(SHARED)
        if status.f_bavail * status.f_frsize > num_bytes + _ROOM_BYTES:
            return _reserved(num_bytes)
    # Memory of the kernel's own, which the size of /dev/shm does not limit.
    descriptor = os.memfd_create("agentrl-bucket")
    os.truncate(descriptor, num_bytes)
    return descriptor


def _reserved(num_bytes: int) -> int:
    descriptor = os.open(SHARED, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # A page that cannot be had when it is written would end the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def mapped(path: str, num_bytes: int, *, shared: bool) -> Tensor:
    """A file as a uint8 tensor. shared: writes are visible to other processes.

    Unlike mmap, this mapping keeps no descriptor open: a sink may hold thousands of buckets.
    """
    return torch.from_file(path, shared=shared, size=num_bytes, dtype=torch.uint8)
