"""Weights in a device's memory: the checksum that any device computes, and numbers that are not finite."""

from __future__ import annotations

import random

import pytest
import torch

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.protocols import DevicePart, TensorSpec
from agentrl.weights import cuda
from agentrl.weights.device import allocated, content_hash, device_checksum, layout_of, packed
from agentrl.weights.host_copy import HostCopy
from tests.engine.devices import FileMemory, packed_of

BITS = 2**64
GOLDEN, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
ROW = 4096 * 4


def mixed(x: int) -> int:
    for _ in range(2):
        x = (x ^ (x >> 32)) * MIX % BITS
    return x ^ (x >> 32)


def by_hand(data: bytes) -> int:
    """The formula of `content_hash`, in Python's integers without limits."""
    data += bytes(-len(data) % ROW)
    total = 0
    for number in range(len(data) // ROW):
        row = data[number * ROW :][:ROW]
        words = (int.from_bytes(row[n : n + 4], "little", signed=True) for n in range(0, ROW, 4))
        keys = (mixed((column + 1) * GOLDEN % BITS) | 1 for column in range(4096))
        sums = sum(word * key for word, key in zip(words, keys, strict=True))
        total += mixed((GOLDEN * (number + 1) + sums) % BITS)
    return total % BITS


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, ROW - 1, ROW, ROW + 5, 3 * ROW + 2])
def test_the_hash_is_its_formula_here_and_in_a_server(size, monkeypatch):
    data = random.Random(size).randbytes(size)
    hashed = int(content_hash(tensor_of(data)))
    assert hashed % BITS == by_hand(data)
    assert int(agentrl_sglang.content_hash(tensor_of(data))) == hashed
    for module in ("agentrl.weights.device", "agentrl.engine.sglang.inside.agentrl_sglang"):
        # However the bytes are cut into chunks of whole rows.
        monkeypatch.setattr(f"{module}._CHUNK_BYTES", ROW)
    assert int(content_hash(tensor_of(data))) == int(agentrl_sglang.content_hash(tensor_of(data))) == hashed


def test_the_hash_tells_apart_what_differs_a_little():
    data = random.Random(0).randbytes(ROW + 40)
    seen = {int(content_hash(tensor_of(data)))}
    for bit in range(0, 8 * len(data), 97):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(int(content_hash(tensor_of(bytes(changed)))))
    places = range(0, len(data) - 4, 40)
    for place in places:
        # Two neighbours change places; two numbers change their signs.
        changed = bytearray(data)
        changed[place : place + 4], changed[place + 4 : place + 8] = (
            data[place + 4 : place + 8],
            data[place : place + 4],
        )
        seen.add(int(content_hash(tensor_of(bytes(changed)))))
        changed = bytearray(data)
        changed[place + 3] ^= 0x80
        changed[(place + 43) % len(data)] ^= 0x80
        seen.add(int(content_hash(tensor_of(bytes(changed)))))
    first, second = data[:ROW], data[ROW:].ljust(ROW, b"\0")
    seen |= {
        int(content_hash(tensor_of(rows))) for rows in (first + first, second + first, first + second + first)
    }
    assert len(seen) == 1 + len(range(0, 8 * len(data), 97)) + 2 * len(places) + 3


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
