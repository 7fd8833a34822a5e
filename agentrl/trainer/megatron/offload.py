"""Offloading of networks that are not in use: their bytes are copied to the CPU, and back before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PINNED_BYTES = 64 << 20
"""Pinned memory is allocated in buffers of this size: torch rounds an allocation up to a power of two."""

Tensors = Callable[[], Iterable[Tensor]]


class _OffloadedStorage(NamedTuple):
    """A storage that is empty now, its size when onloaded, and copies of its bytes."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: Sequence[Tensor]


class Offloaded:
    """The memory of some tensors, which is allocated only inside `onloaded`.

    tensors, scratch: called each time, since an optimizer creates its tensors in its first step. The contents
    of `scratch` are lost: their user overwrites them. Views of one storage are moved once, together.
    """

    def __init__(self, tensors: Tensors, scratch: Tensors = tuple) -> None:
        self._tensors, self._scratch = tensors, scratch
        self._offloaded: list[_OffloadedStorage] = []
        self._pinned: list[Tensor] = []
        self._offload()

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Restore the tensors for the block; afterwards they are empty, and their memory is free."""
        self._onload()
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        scratch = _storages(self._scratch()).values()
        self._offloaded = [_OffloadedStorage(storage, storage.nbytes(), ()) for storage in scratch]
        used = 0
        for storage in _storages(self._tensors()).values():
            pieces = self._copy_to_pinned(_bytes_of(storage), used)
            used += storage.nbytes()
            self._offloaded.append(_OffloadedStorage(storage, storage.nbytes(), pieces))
        for offloaded in self._offloaded:
            offloaded.storage.resize_(0)

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

    def _onload(self) -> None:
        for storage, num_bytes, pieces in self._offloaded:
            storage.resize_(num_bytes)
            bytes_ = _bytes_of(storage)
            for piece in pieces:
                bytes_[: len(piece)].copy_(piece)
                bytes_ = bytes_[len(piece) :]


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By their address. CPU memory that numpy shares cannot be resized; it is not offloaded."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages if storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
