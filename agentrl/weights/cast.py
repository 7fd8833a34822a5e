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

from collections.abc import Sequence
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


def encoded(weight: Tensor, matrix: Matrix) -> tuple[Tensor, ...]:
    """The parts of a matrix, by the formula above. weight: [rows, columns], of any floating dtype."""
    blocks_RrCc = _blocks(weight.float(), matrix.block)
    scale_dtype = torch_dtype(matrix.parts[1].dtype)
    scale_RC = _scales(blocks_RrCc.abs().amax(dim=(1, 3)) / _LARGEST[matrix.grid], scale_dtype, matrix)
    ratio = blocks_RrCc / scale_RC.float()[:, None, :, None]
    largest = _LARGEST[matrix.grid]
    # A scale that was rounded down leaves a little more.
    numbers = _whole(ratio.clamp_(-largest, largest), matrix.shape)
    scales = scale_RC.reshape(matrix.parts[1].shape)
    if matrix.grid == "fp8":
        return numbers.to(torch_dtype(FP8)), scales
    shape = torch.tensor(matrix.shape, dtype=torch_dtype(matrix.parts[2].dtype), device=weight.device)
    return _packed(numbers.round_().int()), scales, shape


def decoded(parts: Sequence[Tensor], matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix that parts stand for: q x scale in fp32, rounded to `dtype`."""
    stored, scales = parts[0], parts[1]
    numbers = stored.float() if matrix.grid == "fp8" else _unpacked(stored, matrix.shape[1]).float()
    blocks_RrCc = _blocks(numbers, matrix.block)
    scale_RC = scales.float().reshape(blocks_RrCc.shape[0], blocks_RrCc.shape[2])
    return _whole(blocks_RrCc * scale_RC[:, None, :, None], matrix.shape).to(dtype)


def rounded(weight: Tensor, matrix: Matrix) -> Tensor:
    """The matrix that its parts stand for, in its dtype: what whoever reads them computes with."""
    return decoded(encoded(weight, matrix), matrix, weight.dtype)


def _scales(exact_RC: Tensor, dtype: torch.dtype, matrix: Matrix) -> Tensor:
    if matrix.rounds_up:
        mantissa, exponent = exact_RC.frexp()
        # The mantissa of a power of two is 0.5, and it is its own.
        power = torch.ones_like(exact_RC).ldexp(exponent - (mantissa == 0.5).int())
        # What is not finite stays so, and is found.
        exact_RC = power.where((exact_RC > 0) & exact_RC.isfinite(), exact_RC)
    scale_RC = exact_RC.to(dtype)
    return torch.ones_like(scale_RC).where(scale_RC == 0, scale_RC)


def _blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix as [blocks of rows, rows, blocks of columns, columns], with zeros at its ends."""
    (rows, columns), (height, width) = matrix.shape, block
    if rows % height or columns % width:
        matrix = pad(matrix, (0, -columns % width, 0, -rows % height))
    return matrix.reshape(-(-rows // height), height, -(-columns // width), width)


def _whole(blocks_RrCc: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_blocks`."""
    whole = blocks_RrCc.flatten(2).flatten(0, 1)
    return whole[: shape[0], : shape[1]].contiguous()


def _packed(numbers: Tensor) -> Tensor:
    """int32 [rows, columns / 8, rounded up], of whole numbers from -8 to 7."""
    padded = pad(numbers, (0, -numbers.shape[1] % _PER_WORD)) + _OFFSET
    shifts = torch.arange(_PER_WORD, device=numbers.device) * _BITS
    words = (padded.long().reshape(len(padded), -1, _PER_WORD) << shifts).sum(dim=2)
    # The last of eight reaches into the sign.
    return (words - ((words >> 31) << 32)).int()


def _unpacked(words: Tensor, columns: int) -> Tensor:
    """The inverse of `_packed`."""
    shifts = torch.arange(_PER_WORD, device=words.device, dtype=torch.int32) * _BITS
    numbers = ((words.unsqueeze(2) >> shifts) & 15) - _OFFSET
    return numbers.flatten(1)[:, :columns]
