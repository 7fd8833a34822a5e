"""Networks that have nothing to do leave the GPU: their bytes go to the CPU, and come back before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PINNED_BYTES = 64 << 20
"""Pinned memory is taken in pieces of this size: torch rounds what it is asked for up to a power of two."""

Tensors = Callable[[], Iterable[Tensor]]


class _Kept(NamedTuple):
    """A storage that holds nothing now, its size when it does, and what it held, piece by piece."""

    storage: torch.UntypedStorage
    num_bytes: int
    pieces: Sequence[Tensor]


class Offloaded:
    """The memory of some tensors, which is theirs only inside `onloaded`.

    tensors, scratch: asked each time, since an optimizer's appear with its first step. What is in `scratch`
    is not kept: whoever wakes up overwrites it. Views of one memory are moved once, together.
    """

    def __init__(self, tensors: Tensors, scratch: Tensors = tuple) -> None:
        self._tensors, self._scratch = tensors, scratch
        self._kept: list[_Kept] = []
        self._pinned: list[Tensor] = []
        self._offload()

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """The tensors hold what they held; afterwards they hold nothing, and their memory is free."""
        self._onload()
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        scratch = _storages(self._scratch()).values()
        self._kept = [_Kept(storage, storage.nbytes(), ()) for storage in scratch]
        used = 0
        for storage in _storages(self._tensors()).values():
            pieces = self._pinned_for(_bytes_of(storage), used)
            used += storage.nbytes()
            self._kept.append(_Kept(storage, storage.nbytes(), pieces))
        for kept in self._kept:
            kept.storage.resize_(0)

    def _pinned_for(self, bytes_: Tensor, start: int) -> list[Tensor]:
        """Copy bytes to where there are `start` before them; the rooms of the last time are filled again."""
        pieces = []
        while len(bytes_):
            number, at = divmod(start, PINNED_BYTES)
            if number == len(self._pinned):
                self._pinned.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=bytes_.is_cuda))
            room = self._pinned[number][at : at + len(bytes_)]
            pieces.append(room.copy_(bytes_[: len(room)]))
            bytes_, start = bytes_[len(room) :], start + len(room)
        return pieces

    def _onload(self) -> None:
        for storage, num_bytes, pieces in self._kept:
            storage.resize_(num_bytes)
            bytes_ = _bytes_of(storage)
            for piece in pieces:
                bytes_[: len(piece)].copy_(piece)
                bytes_ = bytes_[len(piece) :]


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """By where they are. Memory of the CPU that numpy has seen stays there; there is nothing to win."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in found if storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
