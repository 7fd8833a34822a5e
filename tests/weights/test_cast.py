"""A cast is exact: against all numbers of a grid, enumerated, and compared in exact arithmetic."""

from __future__ import annotations

from bisect import bisect
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from agentrl.types.seams import TensorSpec
from agentrl.weights.cast import Matrix, decoded, encoded, rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# e4m3: a sign, four bits of exponent with the bias 7, three of mantissa; the last pattern is no number.
E4M3 = {
    sign * (Fraction(m, 8) * Fraction(1, 64) if e == 0 else (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7)): (
        (sign < 0) << 7 | e << 3 | m
    )
    for sign, e, m in product((1, -1), range(16), range(8))
    if (e, m) != (15, 7)
}
VALUES = sorted(E4M3)


def fp8_of(rows, columns, block, *, scale="float32", shape=None, rounds_up=False):
    counts = tuple(-(-n // b) for n, b in zip((rows, columns), block, strict=True))
    parts = (
        TensorSpec("w.weight", (rows, columns), "float8_e4m3fn"),
        TensorSpec("w.weight_scale_inv", counts if shape is None else shape, scale),
    )
    return Matrix("w.weight", (rows, columns), "fp8", block, parts, rounds_up)


def int4_of(rows, columns, group, scale="bfloat16"):
    parts = (
        TensorSpec("w.weight_packed", (rows, -(-columns // 8)), "int32"),
        TensorSpec("w.weight_scale", (rows, columns // group), scale),
        TensorSpec("w.weight_shape", (2,), "int64"),
    )
    return Matrix("w.weight", (rows, columns), "int4", (1, group), parts)


def weights(rows, columns, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(rows, columns, generator=generator) * 3)
    return (torch.randn(rows, columns, generator=generator) * spread * 0.01).to(dtype)


def nearest(x: Fraction, grid: list[Fraction]) -> Fraction:
    """The nearest number of a grid; of two, the one with an even pattern."""
    place = bisect(grid, x)
    around = grid[max(place - 1, 0) : place + 1]
    best = min(abs(x - g) for g in around)
    found = [g for g in around if abs(x - g) == best]
    return found[0] if len(found) == 1 else next(g for g in found if E4M3.get(g, int(g)) % 2 == 0)


def in_block(matrix, block, i, j):
    return matrix[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(4, 8), (16, 16), (3, 5), (1, 20)])
def test_fp8_is_the_nearest_number_of_the_grid_in_every_block(dtype, scale, block):
    weight = weights(16, 20, dtype)
    weight[:3, :5] = 0
    matrix = fp8_of(16, 20, block, scale=scale)
    numbers, scales = encoded(weight, matrix)
    assert (numbers.dtype, scales.dtype) == (torch.float8_e4m3fn, getattr(torch, scale))
    assert tuple(scales.shape) == matrix.parts[1].shape
    original, found = weight.float().numpy(), numbers.view(torch.uint8).numpy()
    for i, j in np.ndindex(*scales.shape):
        own = in_block(original, block, i, j)
        expected = torch.tensor(np.float32(abs(own).max()) / np.float32(448)).to(getattr(torch, scale))
        expected = expected if expected else torch.ones(())
        assert scales[i, j] == expected
        quotients = own / np.float32(float(expected))
        for quotient, pattern in zip(quotients.flat, in_block(found, block, i, j).flat, strict=True):
            value = nearest(Fraction(float(np.clip(quotient, -448, 448))), VALUES)
            # 0 has two patterns, and a number that is rounded to it keeps its sign.
            assert pattern & 0x7F == E4M3[value] & 0x7F
            assert value == 0 or pattern == E4M3[value]


def test_scales_that_are_powers_of_two_are_rounded_up():
    weight = weights(8, 16)
    weight[0, 0], weight[4, 8] = 448 * 2.0**-5, 0
    weight[0:4, 0:8].clamp_(-14, 14)
    matrix = fp8_of(8, 16, (4, 8), rounds_up=True)
    numbers, scales = encoded(weight, matrix)
    for i, j in np.ndindex(2, 2):
        exact = Fraction(float(in_block(weight, (4, 8), i, j).abs().max())) / 448
        powers = [Fraction(2) ** e for e in range(-140, 120)]
        assert Fraction(float(scales[i, j])) == min(power for power in powers if power >= exact)
    assert scales[0, 0] == 2.0**-5
    assert numbers.float().isfinite().all()
    assert torch.equal(rounded(rounded(weight, matrix), matrix), rounded(weight, matrix))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_a_matrix_has_the_shape_of_the_file(shape):
    weight = weights(6, 10)
    numbers, scale = encoded(weight, fp8_of(6, 10, (6, 10), shape=shape))
    assert tuple(scale.shape) == shape
    assert float(scale) == np.float32(weight.abs().max()) / np.float32(448)
    assert float(numbers.float().abs().max()) == 448


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [32, 96, 44])
def test_int4_is_the_nearest_of_fifteen_and_is_packed_by_eight(dtype, columns):
    group = 4 if columns == 44 else 32
    weight, matrix = weights(6, columns, dtype), int4_of(6, columns, group)
    weight[2, :group] = 0
    packed, scales, shape = encoded(weight, matrix)
    assert shape.tolist() == [6, columns]
    assert packed.dtype == torch.int32
    for row in range(6):
        bits = sum((int(word) % 2**32) << 32 * k for k, word in enumerate(packed[row].tolist()))
        for column in range(columns):
            own = weight[row].float().numpy()[column // group * group :][:group]
            scale = torch.tensor(np.float32(abs(own).max()) / np.float32(7)).bfloat16()
            scale = scale if scale else torch.ones(())
            assert scales[row, column // group] == scale
            quotient = np.float32(float(weight[row, column])) / np.float32(float(scale))
            number = nearest(Fraction(float(np.clip(quotient, -7, 7))), [*map(Fraction, range(-7, 8))])
            assert (bits >> 4 * column) % 16 - 8 == number


@pytest.mark.parametrize("matrix", [fp8_of(16, 20, (4, 8)), fp8_of(16, 20, (16, 20)), int4_of(16, 64, 32)])
def test_what_parts_stand_for_is_their_product_and_casting_it_changes_nothing(matrix):
    weight = weights(*matrix.shape)
    parts = encoded(weight, matrix)
    value = decoded(parts, matrix, torch.float32)
    scale = parts[1].double().repeat_interleave(matrix.block[0], 0).repeat_interleave(matrix.block[1], 1)
    scale = scale[: matrix.shape[0], : matrix.shape[1]]
    numbers = value.double() / scale
    # All numbers of both grids are multiples of 2^-9.
    assert torch.equal(((numbers * 512).round() / 512 * scale).float(), value)
    assert (value - weight).abs().max() <= weight.abs().max() / (16 if matrix.grid == "fp8" else 13)
    assert torch.equal(rounded(value, matrix), value)
    again = encoded(value, matrix)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(parts, again, strict=True))
    assert rounded(weight.bfloat16(), matrix).dtype == torch.bfloat16


def test_minus_8_is_read():
    matrix = int4_of(1, 8, 8)
    word = sum(number << 4 * k for k, number in enumerate([0, 1, 2, 8, 15, 7, 9, 0]))
    parts = (torch.tensor([[word - 2**32 if word >= 2**31 else word]]).int(), torch.tensor([[0.5]]), None)
    assert decoded(parts, matrix, torch.float32).tolist() == [[-4, -3.5, -3, 0, 3.5, -0.5, 0.5, -4]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "matrix", [fp8_of(16, 32, (4, 8)), fp8_of(16, 32, (4, 8), rounds_up=True), int4_of(16, 32, 32)]
)
def test_a_number_that_is_not_finite_is_found_after_the_cast(matrix, number):
    weight = weights(16, 32)
    weight[5, 6] = number
    numbers, scales, *_ = encoded(weight, matrix)
    assert not (scales.float().isfinite().all() and numbers.float().isfinite().all())
    assert not rounded(weight, matrix).isfinite().all()
