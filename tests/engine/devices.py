"""A device of the CPU: its memory is shared memory, which other processes open as they would map a card's."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from agentrl.trainer.launch.device_weights import DeviceFacts, DeviceSnapshot
from agentrl.types.seams import DeviceHandle, SnapshotSink, TensorSpec
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import pack_buckets, size_of
from agentrl.weights.device import Packed, layout_of, packed, views_in
from agentrl.weights.shared import SharedBuffer
from agentrl.weights.snapshot import LocalSnapshot

NamedTensors = Sequence[tuple[str, torch.Tensor]]


class FileMemory:
    """What `allocated` makes on a card. It is not zero at first, as there."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer: SharedBuffer | None = SharedBuffer(max(num_bytes, 1))
        self.bytes_B = self._buffer.bytes_B[:num_bytes].fill_(0xA5)
        self.handle = DeviceHandle(num_bytes, path=self._buffer.path)

    def free(self) -> None:
        self.bytes_B = self.bytes_B.new_empty(0)
        self._buffer = None


def of_device(_: torch.device, num_bytes: int) -> FileMemory:
    """In place of `allocated`."""
    return FileMemory(num_bytes)


def packed_of(tensors: NamedTensors, bucket_bytes: int = 100) -> Packed:
    """Some tensors in such memory, in buckets."""
    buckets = (bucket.tensors for bucket in pack_buckets(tensors, bucket_bytes))
    # A wide number after narrow ones would not be aligned.
    layout = layout_of(
        [tuple(load) for all_ in buckets for _, load in groupby(all_, lambda spec: spec.dtype)]
    )
    assert layout is not None
    values = dict(tensors)

    def fill(load: Iterable[TensorSpec], bytes_B: torch.Tensor) -> None:
        for name, tensor in views_in(tuple(load), bytes_B):
            tensor.copy_(values[name])

    return packed(layout, FileMemory(layout.num_bytes), fill)


class PackedSnapshot(DeviceSnapshot):
    """Tensors in such memory of this process. packed: where they are; copies: that were made on the host."""

    def __init__(self, tensors: NamedTensors) -> None:
        self.packed, self.copies = packed_of(tensors), 0

        async def copy(number: int) -> LocalSnapshot:
            self.copies += 1
            return LocalSnapshot(list(pack_buckets(tensors, 100)), checksum(tensors))

        facts = DeviceFacts(0, self.packed.weights, self.packed.not_finite)
        super().__init__(facts, process=f"process {os.getpid()}", copy=copy, freed=[])

    def damage(self) -> None:
        """Flip a bit behind the back of the checksums."""
        self.packed.memory.bytes_B[self.packed.weights.parts[-1].start] ^= 1

    def free(self) -> None:
        super().free()
        self.packed.memory.free()


class MappingSink(SnapshotSink):
    """Keeps the last snapshot, as the sink of servers does. does: called with each, before it is kept."""

    takes_device_memory = True

    def __init__(self):
        self.snapshot, self.does = None, lambda snapshot: None

    def begin(self, manifest, version):
        raise AssertionError("nothing passes through the driver")

    async def load(self, snapshot, version):
        self.does(snapshot)
        before, self.snapshot = self.snapshot, snapshot
        if before is not None:
            before.free()

    def holds(self, snapshot):
        return self.snapshot is snapshot


def mapped(snapshot):
    """What another process finds in the memory of a handle, by name."""
    path, tensors = snapshot.device.handle.path, {}
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    bytes_B = torch.frombuffer(memory, dtype=torch.uint8)
    for part in snapshot.device.parts:
        span_B = bytes_B[part.start : part.start + sum(map(size_of, part.tensors))]
        tensors |= dict(views_in(part.tensors, span_B))
    return tensors
