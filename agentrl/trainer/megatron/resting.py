"""Networks that have nothing to do leave the GPU: their bytes go to the CPU, and come back before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Resting:
    """The memory of some tensors, which is theirs only inside `awake`.

    tensors: asked each time, since an optimizer's appear with its first step. Views of one memory are moved
    once, together.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._put_away()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """The tensors hold what they held; afterwards they hold nothing, and their memory is free."""
        self._take_back()
        try:
            yield
        finally:
            self._put_away()

    def _put_away(self) -> None:
        found = [tensor.untyped_storage() for tensor in self._tensors()]
        # Memory of the CPU that numpy has seen stays where it is; there is nothing to win there.
        storages = {storage.data_ptr(): storage for storage in found if storage.resizable()}
        # Pinned memory is slow to get: what was there before is used again.
        rooms = [room for _, room in self._kept]
        self._kept = []
        for number, storage in enumerate(storages.values()):
            bytes_ = _bytes_of(storage)
            room = rooms[number] if number < len(rooms) else bytes_[:0].cpu()
            if len(room) != len(bytes_):
                room = torch.empty(len(bytes_), dtype=torch.uint8, pin_memory=bytes_.is_cuda)
            self._kept.append((storage, room.copy_(bytes_)))
            storage.resize_(0)

    def _take_back(self) -> None:
        for storage, room in self._kept:
            storage.resize_(len(room))
            _bytes_of(storage).copy_(room)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
