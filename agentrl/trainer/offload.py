"""Offloading: what a device does not need now is copied to the CPU's memory, and back before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.runtime.collector import freed_bytes

PINNED_BYTES = 64 << 20
"""Pinned memory is allocated in buffers of this size: torch rounds an allocation up to a power of two."""

Tensors = Callable[[], Iterable[Tensor]]


class _OffloadedStorage(NamedTuple):
    """A storage that is empty now, its size when onloaded, and copies of its bytes."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: Sequence[Tensor]


class Offloadable:
    """The memory of some tensors, which is freed by `offload` and allocated again by `onload`.

    tensors, scratch: called each time, since an optimizer creates its tensors in its first step. The contents
    of `scratch` are lost: their user overwrites them. Views of one storage are moved once, together.
    """

    def __init__(self, tensors: Tensors, scratch: Tensors = tuple) -> None:
        self._tensors, self._scratch = tensors, scratch
        self._offloaded: list[_OffloadedStorage] = []
        self._pinned: list[Tensor] = []
        self.is_offloaded = False

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Have the tensors for the block; where they were offloaded, they are so again afterwards."""
        if not self.is_offloaded:
            yield
            return
        self.onload()
        try:
            yield
        finally:
            self.offload()

    def offload(self) -> None:
        """Copy the tensors to the CPU, and free their memory."""
        if self.is_offloaded:
            return
        self.is_offloaded = True
        scratch = _storages(self._scratch()).values()
        self._offloaded = [_OffloadedStorage(storage, storage.nbytes(), ()) for storage in scratch]
        used = 0
        for storage in _storages(self._tensors()).values():
            pieces = self._copy_to_pinned(_bytes_of(storage), used)
            used += storage.nbytes()
            self._offloaded.append(_OffloadedStorage(storage, storage.nbytes(), pieces))
        for offloaded in self._offloaded:
            offloaded.storage.resize_(0)

    def onload(self) -> None:
        """Allocate the tensors' memory, and copy them back."""
        for storage, num_bytes, pieces in self._offloaded:
            storage.resize_(num_bytes)
            bytes_ = _bytes_of(storage)
            for piece in pieces:
                bytes_[: len(piece)].copy_(piece)
                bytes_ = bytes_[len(piece) :]
        self._offloaded = []
        self.is_offloaded = False

    def _copy_to_pinned(self, bytes_: Tensor, start: int) -> list[Tensor]:
        """Copy bytes to offset `start` of the pinned buffers, which are reused from one call to the next."""
        pieces = []
        while len(bytes_):
            number, at = divmod(start, PINNED_BYTES)
            if number == len(self._pinned):
                self._pinned.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=bytes_.is_cuda))
            target = self._pinned[number][at : at + len(bytes_)]
            pieces.append(target.copy_(bytes_[: len(target)]))
            bytes_, start = bytes_[len(target) :], start + len(target)
        return pieces


class NetworkMemory:
    """The memory of one network: its parameters, and what only a step of it needs.

    others: the optimizer's tensors. Those that share memory with a parameter count as parameters. scratch:
    gradients; see `Offloadable`.
    """

    def __init__(self, parameters: Tensors, others: Tensors = tuple, scratch: Tensors = tuple) -> None:
        self._parameters = Offloadable(parameters)

        def only_others() -> Iterator[Tensor]:
            shared = _storages(parameters()).keys()
            return (tensor for tensor in others() if tensor.untyped_storage().data_ptr() not in shared)

        self._others = Offloadable(only_others, scratch)

    def offload(self) -> None:
        """Free all of it."""
        # While the parameters are there, memory that they share is recognized.
        self._others.offload()
        self._parameters.offload()

    def onload(self) -> None:
        """Allocate all of it."""
        self._parameters.onload()
        self._others.onload()

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Have all of it for the block."""
        with self._parameters.onloaded(), self._others.onloaded():
            yield

    @contextmanager
    def parameters_onloaded(self) -> Iterator[None]:
        """Have the parameters for the block, whatever else is offloaded."""
        with self._parameters.onloaded():
            yield


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, so that offloading frees some: the CPU's is the host's."""
    return device.type != "cpu"


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU, whoever uses the rest (bytes); None = the device is the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def offloaded_bytes(device: torch.device, offload: Callable[[], None]) -> int:
    """Call `offload`, and return the memory that the device got back, for other processes, too (bytes)."""
    if device.type != "cuda":
        return freed_bytes(offload)
    before = torch.cuda.memory_reserved(device)
    offload()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By their address. CPU memory that numpy shares cannot be resized; it is not offloaded."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages if storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
