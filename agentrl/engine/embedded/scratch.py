"""Memory of the decoder: on huge pages where the system has them, and used again and again."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MADV_HUGEPAGE") else {}


def zeros(*shape: int, dtype: torch.dtype, is_dense: bool = True) -> Tensor:
    """Like torch.zeros, in memory that the system provides page by page, as it is written.

    is_dense: neighbouring numbers are written together, so that huge pages pay (attention is 5% faster).
    """
    size = math.prod(shape)
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize), **_PRIVATE)
    if _PRIVATE and is_dense:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


class Scratch:
    """Memory for a result that every layer computes anew; it grows to the largest one.

    Fresh memory for each result would be pages that the system has to map, and lines that no cache holds.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)
        self._last = self._memory

    def __call__(self, *shape: int) -> Tensor:
        """A contiguous tensor of that shape, in the memory of all earlier ones."""
        if self._last.shape != shape:
            size = math.prod(shape)
            if size > self._memory.numel():
                self._memory = zeros(size, dtype=self._memory.dtype)
            self._last = self._memory[:size].view(shape)
        return self._last
