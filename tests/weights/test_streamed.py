"""Files written tensor by tensor are read by safetensors, and hold exactly the manifest's tensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import bytes_of, manifest_of
from agentrl.weights.streamed import SafetensorsFile, dtype_of_code, write_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def pieces(tensors):
    return [(spec, bytes_of(tensor)) for spec, (_, tensor) in zip(manifest_of(tensors), tensors, strict=True)]


def put(path, manifest, written):
    with SafetensorsFile(path, manifest) as file:
        for spec, data in written:
            file.put(spec, data)


def some(count=3, dtype=torch.float32):
    return [(f"t{n}", torch.arange(6.0).reshape(2, 3).to(dtype) + n) for n in range(count)]


@settings(deadline=None, max_examples=50)
@given(
    kinds=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)), max_size=8
    )
)
def test_safetensors_reads_the_written_tensors(tmp_path_factory, kinds):
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (f"layer.{n}", torch.randint(0, 2, shape, generator=generator).to(dtype))
        for n, (shape, dtype) in enumerate(kinds)
    ]
    path = tmp_path_factory.mktemp("streamed") / "x.safetensors"
    put(path, manifest_of(pairs), pieces(pairs))
    loaded = load_file(path)
    assert loaded.keys() == dict(pairs).keys()
    for name, tensor in pairs:
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, framework="pt") as opened:
        # transformers refuses a file without this metadata.
        assert opened.metadata() == {"format": "pt"}
        assert {dtype_of_code(opened.get_slice(name).get_dtype()) for name, _ in pairs} == {
            spec.dtype for spec in manifest_of(pairs)
        }


def test_the_data_is_aligned_for_every_dtype(tmp_path):
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        spec = TensorSpec("x" * length, (1,), "float32")
        put(path, [spec], [(spec, np.zeros(4, np.uint8))])
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_bf16_bits_are_kept_even_where_they_spell_nan(tmp_path):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    pairs = [("w", bits.view(torch.bfloat16))]
    write_model(tmp_path, manifest_of(pairs), pieces(pairs))
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"].view(torch.int16), bits)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ([0, 1], "is incomplete: t2 was not written"),
        ([0, 2, 1], "takes TensorSpec.name='t1'.*not TensorSpec.name='t2'"),
        ([0, 1, 2, 2], "takes no more tensors, not TensorSpec.name='t2'"),
        ([1], "takes TensorSpec.name='t0'"),
    ],
)
def test_tensors_that_differ_from_the_manifest_are_an_error(tmp_path, order, sentence):
    pairs = some()
    sent = pieces(pairs)
    with pytest.raises(ValueError, match=sentence):
        put(tmp_path / "x.safetensors", manifest_of(pairs), [sent[number] for number in order])


def test_a_tensor_of_another_kind_or_size_is_an_error(tmp_path):
    (spec,) = manifest_of(some(1))
    with pytest.raises(ValueError, match=r"float32.*, not .*bfloat16"):
        put(tmp_path / "a", [spec], pieces(some(1, torch.bfloat16)))
    with pytest.raises(ValueError, match="t0 has 24 bytes, not 23"):
        put(tmp_path / "b", [spec], [(spec, np.zeros(23, np.uint8))])


def test_an_invalid_manifest_creates_no_file(tmp_path):
    twice = TensorSpec("a", (1,), "float32")
    with pytest.raises(ValueError, match="the manifest has a twice"):
        SafetensorsFile(tmp_path / "x", [twice, twice])
    with pytest.raises(ValueError, match="safetensors has no dtype complex64"):
        SafetensorsFile(tmp_path / "x", [TensorSpec("a", (1,), "complex64")])
    assert not list(tmp_path.iterdir())
    (tmp_path / "x").write_text("somebody's")
    with pytest.raises(FileExistsError):
        SafetensorsFile(tmp_path / "x", [])


def test_an_error_of_the_sender_is_not_hidden(tmp_path):
    with pytest.raises(KeyError, match="theirs"), SafetensorsFile(tmp_path / "x", manifest_of(some())):
        raise KeyError("theirs")


@pytest.mark.parametrize(("file_bytes", "files"), [(1, 5), (48, 3), (71, 3), (72, 2), (120, 1)])
def test_a_model_is_shared_out_over_files(tmp_path, file_bytes, files):
    pairs = some(5)
    write_model(tmp_path, manifest_of(pairs), iter(pieces(pairs)), file_bytes=file_bytes)
    files_read = {path.name: load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))}
    assert len(files_read) == files
    for name, tensor in pairs:
        (holder,) = (file for file, tensors in files_read.items() if name in tensors)
        assert torch.equal(files_read[holder][name], tensor)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        index_json = json.loads(index.read_text())
        assert index_json["metadata"] == {"total_size": 5 * 24}
        assert index_json["weight_map"] == {
            name: file for file, tensors in files_read.items() for name in tensors
        }
        assert list(files_read) == [f"model-{n + 1:05d}-of-{files:05d}.safetensors" for n in range(files)]
    else:
        assert list(files_read) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("count", "sentence"), [(4, "is incomplete: t4 was not written"), (6, "does not have t5")]
)
def test_too_few_and_too_many_are_errors(tmp_path, count, sentence):
    with pytest.raises(ValueError, match=sentence):
        write_model(tmp_path, manifest_of(some(5)), pieces(some(count)), file_bytes=48)
