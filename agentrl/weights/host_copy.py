"""Copies from a GPU to the host's memory, through pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

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
