"""Matrices in 8 or 4 bits a weight: numbers of a small grid, times a scale for each block of them.

    fp8     e4m3 (Micikevicius et al., 2022, arXiv:2209.05433): |q| <= 448, 3 bits after the leading one
    int4    -7 .. 7, eight to a word of 32 bits, the first in its lowest bits, each plus 8

A scale is the largest |w| of its block, over 448 or over 7, rounded to the dtype that scales have; a block
that would have the scale 0 has 1. A weight becomes round(w / scale), computed in fp32: the nearest number of
the grid, of two equally near the even one. So each block reaches the largest number of its grid, and a matrix
that was read from such numbers becomes the same ones again, as far as its own dtype holds them. -8 is read
and not written: with a scale over 7.5, which would need it, weights would move each time that they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import torch_dtype

Grid: TypeAlias = Literal["fp8", "int4"]

FP8 = "float8_e4m3fn"
_LARGEST = {"fp8": 448.0, "int4": 7.0}
_PER_WORD, _BITS, _OFFSET = 8, 4, 8
_SLAB, _MOST = {"cpu": 1 << 19}, 1 << 24
"""Numbers that are computed at once (count): what a cache holds; on a GPU, what keeps it busy."""


class Matrix(NamedTuple):
    """How one matrix is stored.

    name, shape: its own. grid: of its numbers. block: rows and columns that share a scale. parts: the
    tensors of a file that hold it: its numbers, its scales and, of int4, its shape. rounds_up: scales are
    powers of two, rounded up.
    """

    name: str
    shape: tuple[int, ...]
    grid: Grid
    block: tuple[int, int]
    parts: tuple[TensorSpec, ...]
    rounds_up: bool = False


@torch.no_grad()
def encoded(weight: Tensor, matrix: Matrix) -> tuple[Tensor, ...]:
    """The parts of a matrix, by the formula above. weight: [rows, columns], of any floating dtype."""
    stored, *rest = matrix.parts
    scale_RC = _scales(weight, matrix)
    largest = _LARGEST[matrix.grid]
    numbers = weight.new_empty(stored.shape, dtype=torch_dtype(stored.dtype))
    for rows in _slabs(weight):
        ratio = _blocks_of(weight[rows].float(), matrix) / _scale_of(rows, scale_RC, matrix)
        # A scale that was rounded down leaves a little more.
        slab = ratio.clamp_(-largest, largest).flatten(1)[:, : matrix.shape[1]]
        numbers[rows] = slab.to(numbers.dtype) if matrix.grid == "fp8" else _packed(slab.round().int())
    scales = scale_RC.reshape(rest[0].shape)
    if matrix.grid == "fp8":
        return numbers, scales
    shape = torch.tensor(matrix.shape, dtype=torch_dtype(rest[1].dtype), device=weight.device)
    return numbers, scales, shape


@torch.no_grad()
def decoded(parts: Sequence[Tensor], matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix that parts stand for: number x scale in fp32, rounded to `dtype`."""
    stored, scales = parts[0], parts[1]
    counts = [-(-size // each) for size, each in zip(matrix.shape, matrix.block, strict=True)]
    scale_RC = scales.reshape(counts)
    weight = stored.new_empty(matrix.shape, dtype=dtype)
    for rows in _slabs(weight):
        numbers = stored[rows] if matrix.grid == "fp8" else _unpacked(stored[rows], matrix.shape[1])
        product = _blocks_of(numbers.float(), matrix) * _scale_of(rows, scale_RC, matrix)
        weight[rows] = product.flatten(1)[:, : matrix.shape[1]]
    return weight


def rounded(weight: Tensor, matrix: Matrix) -> Tensor:
    """The matrix that its parts stand for, in its dtype: what whoever reads them computes with."""
    return decoded(encoded(weight, matrix), matrix, weight.dtype)


def _scales(weight: Tensor, matrix: Matrix) -> Tensor:
    """[blocks of rows, blocks of columns], in the dtype of their file."""
    height, width = matrix.block
    short = -weight.shape[1] % width, -weight.shape[0] % height
    whole = pad(weight, (0, short[0], 0, short[1])) if any(short) else weight
    blocks_RrCc = whole.reshape(len(whole) // height, height, -1, width)
    most_RC = torch.maximum(blocks_RrCc.amax(dim=(1, 3)), -blocks_RrCc.amin(dim=(1, 3)))
    exact_RC = most_RC.float() / _LARGEST[matrix.grid]
    if matrix.rounds_up:
        mantissa, exponent = exact_RC.frexp()
        # The mantissa of a power of two is 0.5, and it is its own.
        power = torch.ones_like(exact_RC).ldexp(exponent - (mantissa == 0.5).int())
        # What is not finite stays so, and is found.
        exact_RC = power.where((exact_RC > 0) & exact_RC.isfinite(), exact_RC)
    scale_RC = exact_RC.to(torch_dtype(matrix.parts[1].dtype))
    return torch.ones_like(scale_RC).where(scale_RC == 0, scale_RC)


def _slabs(weight: Tensor) -> Iterator[slice]:
    """Rows that are computed at once: few, so that fp32 takes little memory beside the matrix."""
    height = max(_SLAB.get(weight.device.type, _MOST) // max(weight.shape[1], 1), 1)
    return (slice(start, min(start + height, len(weight))) for start in range(0, len(weight), height))


def _blocks_of(slab: Tensor, matrix: Matrix) -> Tensor:
    """Some rows as [rows, blocks of columns, columns of a block], with zeros at their ends."""
    width = matrix.block[1]
    short = -slab.shape[1] % width
    return (pad(slab, (0, short)) if short else slab).reshape(len(slab), -1, width)


def _scale_of(rows: slice, scale_RC: Tensor, matrix: Matrix) -> Tensor:
    """The scales of some rows, fp32 [rows, blocks of columns, 1]."""
    places = torch.arange(rows.start, rows.stop, device=scale_RC.device) // matrix.block[0]
    return scale_RC[places].float().unsqueeze(2)


def _packed(numbers: Tensor) -> Tensor:
    """int32 [rows, columns / 8, rounded up], of whole numbers from -8 to 7."""
    padded = pad(numbers, (0, -numbers.shape[1] % _PER_WORD)) + _OFFSET
    shifts = torch.arange(_PER_WORD, device=numbers.device, dtype=torch.int32) * _BITS
    # No two have a bit in common; the last one reaches into the sign.
    return (padded.reshape(len(padded), -1, _PER_WORD) << shifts).sum(dim=2, dtype=torch.int32)


def _unpacked(words: Tensor, columns: int) -> Tensor:
    """The inverse of `_packed`."""
    shifts = torch.arange(_PER_WORD, device=words.device, dtype=torch.int32) * _BITS
    numbers = ((words.unsqueeze(2) >> shifts) & 15) - _OFFSET
    return numbers.flatten(1)[:, :columns]
