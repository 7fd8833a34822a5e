"""Deltas turn one version into the next, bit for bit, and apply to no other weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights import delta
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import pack_buckets, size_of, unpack
from agentrl.weights.delta import DeltaError

DTYPES = ("float32", "bfloat16", "float16", "int64", "int8", "bool", "float64", "complex64")


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[Bucket], list[Bucket]]:
    """Two versions of one model with arbitrary bits, from none to all changed, in buckets."""
    count = draw(st.integers(1, 4))
    specs = [
        TensorSpec(
            f"t{n}",
            tuple(draw(st.lists(st.integers(0, 7), max_size=3))),
            draw(st.sampled_from(DTYPES)),
        )
        for n in range(count)
    ]
    base = [draw(st.binary(min_size=size_of(spec), max_size=size_of(spec))) for spec in specs]
    result = []
    for old in base:
        new = bytearray(old)
        for place in draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=5)) if old else []:
            new[place] ^= draw(st.integers(1, 255))
        result.append(
            bytes(new) if draw(st.booleans()) else draw(st.binary(min_size=len(old), max_size=len(old)))
        )
    return buckets_of(specs, base, 1), buckets_of(specs, result, 3)


def buckets_of(specs: list[TensorSpec], data: list[bytes], each: int) -> list[Bucket]:
    return [
        Bucket(tuple(specs[n : n + each]), np.frombuffer(b"".join(data[n : n + each]), np.uint8).copy())
        for n in range(0, len(specs), each)
    ]


def bits_of(buckets: list[Bucket]) -> dict[TensorSpec, bytes]:
    return {spec: data.tobytes() for bucket in buckets for spec, data in delta.slices(bucket)}


@given(versions())
def test_a_delta_gives_the_next_version_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, both: tuple[list[Bucket], list[Bucket]]
) -> None:
    base, result = both
    before = bits_of(base)
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    delta.write(delta.delta_between(base, result), path)
    assert bits_of(delta.apply(delta.read(path), base)) == bits_of(result)
    assert bits_of(base) == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@given(versions())
def test_the_checksum_is_that_of_the_tensors(both: tuple[list[Bucket], list[Bucket]]) -> None:
    for buckets in both:
        tensors = [pair for bucket in buckets for pair in unpack(bucket)]
        assert delta.checksum_of(buckets) == checksum(tensors)


def packed(**tensors: torch.Tensor) -> list[Bucket]:
    return list(pack_buckets(tensors.items(), 1 << 20))


def some(seed: int, *, changed: int = 0) -> list[Bucket]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(100, generator=generator)
    weight[:changed] += 1
    return packed(weight=weight, same=torch.arange(1000))


def test_small_changes_are_sent_as_words_and_large_ones_in_full() -> None:
    few = delta.delta_between(some(0), some(0, changed=10))
    assert (set(few.changes), few.num_bytes) == ({"weight"}, 10 * (4 + 4))
    many = delta.delta_between(some(0), some(0, changed=60))
    assert (many.changes["weight"].at, many.num_bytes) == (None, 400)
    assert delta.delta_between(some(0), some(0)).num_bytes == 0


def test_payloads_of_nan_and_signs_of_zero_arrive() -> None:
    base = packed(x=torch.tensor([0x7FC00000, 0, 0x3F800000], dtype=torch.int32).view(torch.float32))
    result = packed(x=torch.tensor([0x7FC00001, -(2**31), 0x3F800000], dtype=torch.int32).view(torch.float32))
    difference = delta.delta_between(base, result)
    assert bits_of(delta.apply(difference, base)) == bits_of(result)


def test_a_delta_applies_only_to_its_base() -> None:
    difference = delta.delta_between(some(0), some(0, changed=3))
    with pytest.raises(DeltaError, match="belongs to other weights"):
        delta.apply(difference, some(1))
    with pytest.raises(DeltaError, match="belongs to other weights"):
        delta.apply(difference, some(0, changed=3))


def test_versions_of_two_models_have_none() -> None:
    for other in (packed(weight=torch.zeros(3)), packed(weight=torch.zeros(100), other=torch.zeros(1))):
        with pytest.raises(DeltaError, match="not the same in both"):
            delta.delta_between(packed(weight=torch.zeros(100)), other)


@given(st.data())
def test_a_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base, result = some(0), some(0, changed=10)
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    delta.write(delta.delta_between(base, result), path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        applied = delta.apply(delta.read(path), base)
    except DeltaError:
        return
    assert bits_of(applied) == bits_of(result), "the damage was in unused bytes"


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "delta.safetensors"
    with pytest.raises(DeltaError, match="cannot be read"):
        delta.read(path)
    delta.write(delta.delta_between(some(0), some(1)), path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DeltaError, match="cannot be read"):
        delta.read(path)


def test_other_files_are_no_deltas(tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    save_file({"x": np.zeros(3, np.uint32)}, path)
    with pytest.raises(DeltaError, match="is no delta"):
        delta.read(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weight|at", np.array([2**31], np.uint32)),
        ("weight|at", np.array([0, 1], np.uint32)),
        ("weight|is", np.array([1.0], np.float32)),
        ("other|all", np.array([1], np.uint32)),
        ("same|all", np.array([1], np.uint64)),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, name: str, words: np.ndarray) -> None:
    path = tmp_path / "delta.safetensors"
    base = some(0)
    difference = delta.delta_between(base, some(0, changed=1))
    delta.write(difference, path)
    metadata = {"format": "agentrl-delta-1", "base": str(difference.base), "result": str(difference.result)}
    save_file(load_file(path) | {name: words}, path, metadata)
    with pytest.raises(DeltaError):
        delta.apply(delta.read(path), base)
