"""Versions of the weights on the device of a rank, and snapshots in the driver, which have their handles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from agentrl.trainer.launch.shared_buffers import AHEAD, Filled, bucket_of
from agentrl.trainer.offload import PINNED_BYTES
from agentrl.types.seams import Bucket, DeviceWeights, Snapshot, TensorSpec, Work
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import size_of
from agentrl.weights.device import Packed, device_checksum
from agentrl.weights.shared import BufferPool, HostCopy

R = TypeVar("R")


class DeviceFacts(NamedTuple):
    """Weights in the memory of a rank's device. number: by which the rank knows them."""

    number: int
    weights: DeviceWeights
    not_finite: str | None


class _Kept(NamedTuple):
    """packed: on the device. pieces: in pinned memory instead, PINNED_BYTES each, once they have left it."""

    packed: Packed
    pieces: list[Tensor]


_kept: dict[int, _Kept] = {}
"""The versions of this process that are not freed. A snapshot may outlive the worker of a plan."""

_numbers = count()
_host_copy = HostCopy()


def keep(packed: Packed) -> DeviceFacts:
    """In rank 0: keep a version until it is freed."""
    number = next(_numbers)
    _kept[number] = _Kept(packed, [])
    return DeviceFacts(number, packed.weights, packed.not_finite)


class DeviceStore:
    """The methods of a worker for versions on its device. Only rank 0 has some; the others do nothing."""

    def free_weights(self, numbers: Collection[int]) -> None:
        """Give the memory of these versions back."""
        for number in _kept.keys() & set(numbers):
            _kept.pop(number).packed.memory.free()

    def settle_weights(self, number: int) -> None:
        """Move a version to the host's memory; its handle may not be used afterwards."""
        if number not in _kept:
            return
        packed, pieces = _kept[number]
        for part_B in packed.memory.bytes_B.split(PINNED_BYTES):
            piece = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=part_B.is_cuda)
            piece[: len(part_B)].copy_(part_B, non_blocking=True)
            pieces.append(piece)
        # It waits for the copies.
        packed.memory.free()

    def copied_weights(self, number: int, bucket_bytes: int) -> Generator[Filled, None, int]:
        """The buckets of a version in shared buffers of at least `bucket_bytes`; returns their checksum."""
        if number not in _kept:
            return 0
        kept, pool = _kept[number], BufferPool(bucket_bytes)
        digests: list[Future[list[int]]] = []
        # Checksums run in threads, so that this one fills the next buffer.
        with ThreadPoolExecutor(AHEAD) as threads:
            for part in kept.packed.weights.parts:
                size = sum(map(size_of, part.tensors))
                filled = Filled(part.tensors, pool.take(size), pool)
                _copy(kept, part.start, filled.buffer.bytes_B[:size])
                filled.buffer.digests = threads.submit(digests_of, bucket_of(filled))
                digests.append(filled.buffer.digests)
                yield filled
            return sum_digests(digest for future in digests for digest in future.result())


def _copy(kept: _Kept, start: int, target_B: Tensor) -> None:
    """Copy bytes of a version from where they are now."""
    if not kept.pieces:
        _host_copy.copy(kept.packed.memory.bytes_B[start : start + len(target_B)], target_B)
        return
    while len(target_B):
        number, at = divmod(start, PINNED_BYTES)
        part_B = kept.pieces[number][at : at + len(target_B)]
        target_B[: len(part_B)].copy_(part_B)
        target_B, start = target_B[len(part_B) :], start + len(part_B)


class DeviceSnapshot:
    """A snapshot on the device of rank 0; see `Snapshot`. This process has no context on that device.

    process: of rank 0. copy: has the rank copy the version of a number to the host's memory. freed: where the
    number is left when nobody needs the version any more.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        *,
        process: str,
        copy: Callable[[int], Awaitable[Snapshot]],
        freed: list[int],
    ) -> None:
        self.number, self.process = facts.number, process
        self.device: DeviceWeights | None = facts.weights
        self.not_finite = facts.not_finite
        self.parts: Sequence[Sequence[TensorSpec]] = tuple(part.tensors for part in facts.weights.parts)
        self.checksum = device_checksum(facts.weights.parts)
        self._copy, self._freed = copy, freed
        self._copied: Snapshot | None = None

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine, as far as is known: a copy may not be."""
        return self._copied is None or self._copied.is_here

    async def on_host(self) -> Snapshot:
        """A copy in the host's memory, made once.

        Raises:
            TrainerError: the rank has gone.
        """
        if self._copied is None:
            self._copied = await self._copy(self.number)
        return self._copied

    async def run(self, work: Work[R]) -> R:
        """Call `work` with the buckets of the copy.

        Raises:
            TrainerError: the rank has gone.
        """
        return await (await self.on_host()).run(work)

    async def buckets(self) -> Sequence[Bucket]:
        """The buckets of the copy.

        Raises:
            TrainerError: the rank has gone.
        """
        return await (await self.on_host()).buckets()

    def free(self) -> None:
        """Leave the number for the trainer, which tells the rank; free the copy."""
        self._freed.append(self.number)
        if self._copied is not None:
            self._copied.free()
