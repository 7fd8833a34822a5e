"""Weights in a device's memory: the checksum that any device computes, and numbers that are not finite."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.engine.sglang.inside.agentrl_sglang import device as inside
from agentrl.types.seams import DevicePart, TensorSpec
from agentrl.weights import cuda, device
from agentrl.weights.device import allocated, device_checksum, layout_of, packed
from agentrl.weights.shared import HostCopy
from tests.engine.devices import FileMemory, packed_of

BITS = 2**64
GOLDEN, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
ROW, LEAST = 16384, 32


def mixed(x: int) -> int:
    for _ in range(2):
        x = (x ^ (x >> 32)) * MIX % BITS
    return x ^ (x >> 32)


@cache
def keys() -> np.ndarray:
    words = (mixed(n * GOLDEN % BITS).to_bytes(8, "little") for n in range(1, 2 * ROW + 1))
    odd = bytearray(byte | 1 for word in words for byte in word)
    return np.frombuffer(odd, np.int8).reshape(16, ROW).astype(np.int64)


def by_hand(data: bytes, block_bytes: int) -> int:
    """The formula of `hashes_of`, in numpy's integers of 64 bits and Python's without limits."""
    padded = b"".join(
        block + bytes(-len(block) % (LEAST * ROW) if len(block) < block_bytes else 0)
        for block in (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    )
    rows = np.frombuffer(padded, np.int8).reshape(-1, ROW).astype(np.int64)
    weights = [mixed(n * MIX % BITS) | 1 for n in range(1, 17)]
    total = 0
    for number, sums in enumerate((rows @ keys().T).tolist()):
        row = sum(weight * one for weight, one in zip(weights, sums, strict=True))
        total += mixed((GOLDEN * (number + 1) + row) % BITS)
    return total % BITS


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def hash_of(data: bytes, module=device) -> int:
    """Beside another bucket, of other bytes, which changes nothing."""
    sums = [module.row_sums(tensor_of(each)) for each in (b"another" * ROW, data, b"")]
    return module.hashes_of(sums).tolist()[1]


@pytest.mark.parametrize("has_products", [True, False])
@pytest.mark.parametrize(
    "size", [0, 1, 3, 4, 7, ROW - 1, ROW, ROW + 5, 3 * ROW + 2, LEAST * ROW, 70 * ROW + 1]
)
def test_the_hash_is_its_formula_here_and_in_a_server(size, has_products, monkeypatch):
    if not has_products:
        monkeypatch.setattr(torch, "_int_mm", missing)
    data = random.Random(size).randbytes(size)
    for block_bytes in (64 << 20, LEAST * ROW):
        for module in (device, inside):
            monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
            assert hash_of(data, module) % BITS == by_hand(data, block_bytes)


class CopiedBytes(TorchDispatchMode):
    """How many bytes operators write that read bytes, and have no numbers of their own."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = func.is_view or func._schema.name in ("aten::new_zeros", "aten::new_empty")
        if isinstance(result, torch.Tensor) and result.dtype in (torch.uint8, torch.int8) and not is_view:
            self.count += result.nbytes
        return result


@pytest.mark.parametrize("module", [device, inside])
@pytest.mark.parametrize("size", [0, 1, LEAST * ROW, 5 * LEAST * ROW, 5 * LEAST * ROW + 77])
def test_the_hash_copies_only_the_end_of_a_bucket(module, size):
    data = tensor_of(bytes(size))
    module._keys(data.device)
    with CopiedBytes() as copied:
        module.row_sums(data)
    assert copied.count == size % (LEAST * ROW)


def missing(*_):
    raise RuntimeError("_int_mm is not there")


def test_the_hash_tells_apart_what_differs_a_little():
    size = ROW + 40
    data = random.Random(0).randbytes(size)
    seen, count = {hash_of(data)}, 1

    def see(*changes: tuple[int, int]) -> None:
        nonlocal count
        changed = bytearray(data)
        for place, bits in changes:
            changed[place] ^= bits
        seen.add(hash_of(bytes(changed)))
        count += 1

    for bit in range(0, 8 * size, 997):
        see((bit // 8, 1 << bit % 8))
    for place in range(0, size - 4, 311):
        # Two numbers change their signs; two neighbours change places.
        see((place + 3, 0x80), ((place + 43) % size, 0x80))
        difference = data[place] ^ data[place + 1]
        if difference:
            see((place, difference), (place + 1, difference))
    first, second = data[:ROW], data[ROW:].ljust(ROW, b"\0")
    for rows in (first + first, second + first, first + second + first):
        seen.add(hash_of(rows))
        count += 1
    assert len(seen) == count


def test_the_checksum_is_over_names_types_shapes_and_order():
    part = DevicePart((TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (6,), "float32")), 0, 5)
    swapped = part._replace(tensors=part.tensors[::-1])
    specs = [
        TensorSpec("c", (2, 3), "float32"),
        TensorSpec("a", (3, 2), "float32"),
        TensorSpec("a", (2, 3), "int32"),
    ]
    changed = [part._replace(tensors=(spec, part.tensors[1])) for spec in specs]
    every = [
        [part],
        [swapped],
        *([each] for each in changed),
        [part._replace(content_hash=6)],
        [part, part],
        [],
    ]
    assert len({device_checksum(parts) for parts in every}) == len(every)
    assert device_checksum([part]) == device_checksum([part._replace(start=256)]), "the place is no content"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64])
def test_a_number_that_is_not_finite_is_named(value, dtype):
    def tensors(bad: float):
        return [
            ("first", torch.ones(3, 5, dtype=dtype)),
            ("steps", torch.full((2,), 2**62)),
            ("empty", torch.empty(0, 4, dtype=dtype)),
            ("last", torch.tensor([1.0, bad, 2.0]).to(dtype)),
        ]

    assert packed_of(tensors(1.0)).not_finite is None
    assert packed_of(tensors(value)).not_finite == "last"
    assert packed_of([("a", torch.tensor([1e300], dtype=torch.float64))]).not_finite is None


def test_tensors_that_would_not_be_aligned_have_no_layout():
    narrow, wide = TensorSpec("a", (3,), "bfloat16"), TensorSpec("b", (2,), "float32")
    assert layout_of([(narrow, wide)]) is None
    layout = layout_of([(wide, narrow), (wide,)])
    assert layout is not None
    assert layout.starts == [0, 256]
    assert layout.num_bytes == 512


def test_what_was_in_the_memory_before_changes_nothing():
    spec = TensorSpec("a", (5,), "bfloat16")
    layout = layout_of([(spec,), (spec,)])
    assert layout is not None

    def sevens(_: object, bytes_B: torch.Tensor) -> None:
        bytes_B.fill_(7)

    hashes = set()
    for before in (0, 0xFF):
        memory = FileMemory(layout.num_bytes)
        memory.bytes_B.fill_(before)
        weights = packed(layout, memory, sevens).weights
        hashes.add(weights.parts)
    assert len(hashes) == 1


def test_a_cpu_has_no_memory_to_map_and_nothing_of_cuda_is_loaded():
    assert allocated(torch.device("cpu"), 1) is None
    assert cuda._driver.cache_info().currsize == 0
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_copy_to_the_host_is_the_same_bytes(size):
    source = torch.randint(0, 256, (size,), dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    HostCopy().copy(source, target)
    assert torch.equal(source, target)
