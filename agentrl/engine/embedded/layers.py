"""Layers of the decoder: matrices in the layout that multiplies fastest, norms in few passes; their memory.

Measured on one AVX-512 core with 32 rows. fp32: small matrices, which stay in the core's own cache, are
fastest as inputs x outputs, row-major (up to 1.4x the usual transpose); large ones, read from memory,
packed by oneDNN (1.25x). bf16: packed is 1.4 to 2.5 times as fast as plain, which is packed at every call.
"""

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


_PACKED_FROM = 1 << 17
_PACKED_FOR_ROWS = 32


class Linear:
    """y = x W^T + b, with W given as [outputs, inputs], and copied."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.bias_O = bias_O
        self._packed = _packs(weight_OI)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACKED_FOR_ROWS)
        else:
            # A copy in any case: of one row or column, both layouts are the same.
            self._weight = weight_OI.t().clone(memory_format=torch.contiguous_format)

    def __call__(self, x_NI: Tensor, scratch: Scratch | None = None) -> Tensor:
        """[N, inputs] -> [N, outputs], in `scratch` unless the matrix is packed: its kernel allocates."""
        if self._packed:
            y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self.bias_O, "none", [], "")
            return y_NO
        out = None if scratch is None else scratch(x_NI.shape[0], self._weight.shape[1])
        if self.bias_O is not None:
            return torch.addmm(self.bias_O, x_NI, self._weight, out=out)
        return torch.mm(x_NI, self._weight, out=out)

    def add_to_(self, base_NO: Tensor, x_NI: Tensor) -> None:
        """Add x W^T + b to base, in place."""
        # A CPU without bfloat16 packs none: its product takes one dtype.
        if self._packed or self.bias_O is not None or base_NO.dtype != self._weight.dtype:
            base_NO.add_(self(x_NI))
        else:
            base_NO.addmm_(x_NI, self._weight)

    def dense(self) -> Tensor:
        """W as [outputs, inputs], read back from the layout it is multiplied in."""
        weight_OI: Tensor = self._weight.to_dense() if self._packed else self._weight.t()
        return weight_OI


def _packs(weight_OI: Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if weight_OI.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_OI.dtype == torch.float32 and weight_OI.numel() >= _PACKED_FROM


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Implemented here, because torch's own takes twice as long on a CPU; rounded where transformers rounds.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = torch.tensor(eps)
        self._inverse_size = 1 / weight.shape[-1]

    def __call__(self, x: Tensor, scratch: Scratch) -> Tensor:
        """The normed x, in `scratch`."""
        return torch.mul(x, self._scale(x), out=scratch(*x.shape)).mul_(self.weight)

    def apply_(self, x: Tensor) -> None:
        """Norm x in place."""
        x.mul_(self._scale(x)).mul_(self.weight)

    def _scale(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
