"""Weights in the memory of a device, which other processes map: how they are laid out, and their checksum.

Nothing of it leaves the device but one number a bucket. XXH3, the hash of `checksum`, is none that a device
computes; that of `hashes_of` is made of products and sums of integers, which give the same 64 bits on a CPU
and on a GPU. The loader in an SGLang server has it, too (`inside/agentrl_sglang`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from agentrl.types.seams import DeviceHandle, DevicePart, DeviceWeights, TensorSpec
from agentrl.weights.codec import non_finite, size_of, torch_dtype
from agentrl.weights.cuda import CudaError, CudaMemory

Fill = Callable[[Sequence[TensorSpec], Tensor], None]
"""Writes tensors end to end into uint8 memory of their size."""

_RESERVED_BYTES = 1 << 30
"""What weights for other processes leave free on a GPU, for whatever is computed next."""

_ALIGNMENT = 256
_ROW_BYTES, _COLUMNS = 16384, 16
_BLOCK_BYTES = 64 << 20
_LEAST_ROWS = 32
_GOLDEN, _MIX = -7046029254386353131, -2960836687051489901
"""The 64 bits 0x9E3779B97F4A7C15 and 0xD6E8FEB86659FD93, as signed numbers."""
_LOW = 0xFFFFFFFF

_log = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """Memory of a device that other processes can map. bytes_B: uint8, on the device."""

    bytes_B: Tensor
    handle: DeviceHandle

    def free(self) -> None:
        """Give it back."""


class BufferLayout(NamedTuple):
    """Buckets in one piece of memory: the tensors of each, where each begins and ends, the size of all."""

    loads: Sequence[tuple[TensorSpec, ...]]
    starts: Sequence[int]
    ends: Sequence[int]
    num_bytes: int


class Packed(NamedTuple):
    """Weights in the memory of a device of this process. not_finite: see `Snapshot`."""

    memory: DeviceMemory
    weights: DeviceWeights
    not_finite: str | None


def allocated(device: torch.device, num_bytes: int) -> DeviceMemory | None:
    """Memory of a GPU; None = the device is none, makes no handles, or would have too little left."""
    if device.type != "cuda":
        return None
    if torch.cuda.mem_get_info(device)[0] < num_bytes + _RESERVED_BYTES:
        # What torch keeps and no tensor uses.
        torch.cuda.empty_cache()
    try:
        if torch.cuda.mem_get_info(device)[0] < num_bytes + _RESERVED_BYTES:
            raise MemoryError(f"the GPU has no {num_bytes / 1e9:.1f} GB to spare")
        return CudaMemory(device, num_bytes)
    except (MemoryError, CudaError, OSError) as error:
        _log.warning("weights go through the host's memory, not from card to card: %s", error)
        return None


def layout_of(loads: Sequence[tuple[TensorSpec, ...]]) -> BufferLayout | None:
    """Where buckets go; None = a tensor would not be aligned to its dtype."""
    starts, ends, end = [], [], 0
    for load in loads:
        starts.append(end)
        for spec in load:
            if end % torch_dtype(spec.dtype).itemsize:
                return None
            end += size_of(spec)
        ends.append(end)
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
    return BufferLayout(loads, starts, ends, end)


def packed(layout: BufferLayout, memory: DeviceMemory, fill: Fill) -> Packed:
    """Fill the memory, look for numbers that are not finite, and compute the checksums, all on the device."""
    spans = [memory.bytes_B[start:end] for start, end in zip(layout.starts, layout.ends, strict=True)]
    sums, extremes = [], []
    for load, span_B in zip(layout.loads, spans, strict=True):
        fill(load, span_B)
        sums.append(row_sums(span_B))
        extremes += [extreme for tensor in _floats(load, span_B) for extreme in tensor.aminmax()]
    # The device is waited for once.
    numbers = hashes_of(sums).tolist() if sums else []
    parts = tuple(map(DevicePart, layout.loads, layout.starts, numbers))
    is_finite = not extremes or bool(torch.stack(extremes).isfinite().all())
    named = (
        pair for load, span_B in zip(layout.loads, spans, strict=True) for pair in views_in(load, span_B)
    )
    return Packed(memory, DeviceWeights(memory.handle, parts), None if is_finite else non_finite(named))


def views_in(load: Sequence[TensorSpec], bytes_B: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie end to end in some bytes, as views, by name."""
    sizes = [*map(size_of, load)]
    for spec, flat_B in zip(load, bytes_B[: sum(sizes)].split(sizes), strict=True):
        yield spec.name, flat_B.view(torch_dtype(spec.dtype)).view(spec.shape)


def device_checksum(parts: Sequence[DevicePart]) -> int:
    """64 bits over name, dtype, shape and bytes of all tensors, and over their order."""
    rows = [[[[*spec] for spec in part.tensors], part.content_hash] for part in parts]
    return int.from_bytes(hashlib.blake2b(repr(rows).encode(), digest_size=8).digest(), "little")


def row_sums(bytes_B: Tensor) -> Tensor:
    """Of some bytes, on their device, what `hashes_of` makes their hash of; nothing waits for it.

    bytes_B: contiguous; all but the end is read where it is.
    """
    keys_CK, weight_C = _keys(bytes_B.device)
    least = _LEAST_ROWS * _ROW_BYTES
    whole = len(bytes_B) // least * least
    blocks = [*bytes_B[:whole].split(_BLOCK_BYTES)] if whole else []
    if whole < len(bytes_B):
        end_B = bytes_B.new_zeros(least)
        end_B[: len(bytes_B) - whole].copy_(bytes_B[whole:])
        blocks.append(end_B)
    if not blocks:
        return torch.zeros(0, dtype=torch.int64, device=bytes_B.device)
    products = [_products(block_B.view(torch.int8).view(-1, _ROW_BYTES), keys_CK) for block_B in blocks]
    return (torch.cat(products) * weight_C).sum(1)


def hashes_of(sums: Sequence[Tensor]) -> Tensor:
    """Signed 64-bit numbers over the bytes of some buckets, by the `row_sums` of each.

    The bytes b[r, k] of a bucket, signed, lie in rows of 16384, with zeros to a multiple of 32 rows; modulo
    2^64:

        sum over r of mix(GOLDEN x (r + 1) + sum over c < 16 of weight[c] x sum over k of key[c, k] x b[r, k])

    No key or weight is even, so a changed byte changes all 16 sums of its row, and `mix` is a bijection. The
    innermost sums are products of matrices of 8 bits, exact in 32, which read each byte once.
    """
    counts = [*map(len, sums)]
    numbers = torch.arange(1, max(counts, default=0) + 1, device=sums[0].device)
    places_R = torch.cat([numbers[:count] for count in counts])
    mixed_R = _mixed(torch.cat([*sums]) + _GOLDEN * places_R)
    return torch.stack([part_R.sum() for part_R in mixed_R.split(counts)])


def _products(rows_RK: Tensor, keys_CK: Tensor) -> Tensor:
    """int32 [rows, 16], exact."""
    try:
        return torch._int_mm(rows_RK, keys_CK.t())
    except RuntimeError:
        # A device without such products: the same numbers, one column at a time.
        columns = [(rows_RK.int() * key_K).sum(1, dtype=torch.int32) for key_K in keys_CK]
        return torch.stack(columns, dim=1)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64 bits after which each bit depends on many."""
    for _ in range(2):
        x = (x ^ ((x >> 32) & _LOW)) * _MIX
    return x ^ ((x >> 32) & _LOW)


@cache
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd numbers: int8 [16, bytes of a row], and int64 [16]."""
    words = _mixed(_GOLDEN * torch.arange(1, _COLUMNS * _ROW_BYTES // 8 + 1, device=device))
    weight_C = _mixed(_MIX * torch.arange(1, _COLUMNS + 1, device=device)) | 1
    return words.view(torch.int8).view(_COLUMNS, _ROW_BYTES) | 1, weight_C


def _floats(load: Sequence[TensorSpec], span_B: Tensor) -> Iterator[Tensor]:
    """The floating-point numbers of a bucket: in one view, where all have one type."""
    dtypes = {*map(torch_dtype, {spec.dtype for spec in load})}
    pairs = views_in(load, span_B) if len(dtypes) > 1 else [("", span_B.view(dtype)) for dtype in dtypes]
    for _, tensor in pairs:
        if tensor.is_floating_point() and tensor.numel():
            # torch has no minimum of the types of one byte.
            yield tensor.half() if tensor.itemsize == 1 else tensor
