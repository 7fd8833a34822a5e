"""Buckets become a Hugging Face directory, as they come."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.runtime.files import is_refused_write
from agentrl.weights.codec import manifest_of, named_weights, pack_buckets, slices
from agentrl.weights.hf.export import save_model, write_directory, write_tensors
from agentrl.weights.hf.fresh import write_untrained
from tests.disks import file_size_limit
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import tokenizer


@pytest.fixture
def like(tmp_path):
    """The directory of a model with other weights, in fp32."""
    save_model(model_of("qwen3"), tokenizer(), str(tmp_path / "like"))
    for name in ("pytorch_model.bin", "model.safetensors.index.json"):
        (tmp_path / "like" / name).write_text('{"weight_map": {}}')
    return tmp_path / "like"


def trained(dtype=torch.float32):
    model = model_of("qwen3").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return list(named_weights(model))


@pytest.mark.parametrize("file_bytes", [2 << 30, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_came(tmp_path, like, dtype, file_bytes):
    named = trained(dtype)
    pieces = (piece for bucket in pack_buckets(named, 50_000) for piece in slices(bucket))
    write_tensors(tmp_path / "out", pieces, manifest=manifest_of(named), like=like, file_bytes=file_bytes)
    # The dtype is the one that the directory says.
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert loaded.keys() == dict(named).keys()
    for name, tensor in named:
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == tokenizer().vocab_size
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (file_bytes < 2 << 30)
    if index.exists():
        total = sum(tensor.nbytes for _, tensor in named)
        assert json.loads(index.read_text())["metadata"]["total_size"] == total
    assert not (tmp_path / "out" / "pytorch_model.bin").exists(), "weights of somebody else"
    assert {path.name for path in tmp_path.iterdir()} == {"like", "out"}


@pytest.mark.parametrize("lacks", [False, True])
def test_each_tensor_is_in_the_file_in_which_it_was(tmp_path, like, lacks):
    """Files that follow no order; a tensor that none has, as a scale, goes to the file of the one before."""
    named = trained()
    names = [name for name, _ in named]
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(names)}
    known = {name: file for name, file in files.items() if name != names[4] or not lacks}
    for file in set(known.values()):
        save_file({name: tensor for name, tensor in named if known.get(name) == file}, like / file)
    (like / "model.safetensors").unlink()
    index = like / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": known}))
    write_directory(tmp_path / "out", pack_buckets(named, 50_000), manifest=manifest_of(named), like=like)
    expected = files | ({names[4]: files[names[3]]} if lacks else {})
    assert json.loads((tmp_path / "out" / index.name).read_text())["weight_map"] == expected
    held = {path.name: load_file(path) for path in (tmp_path / "out").glob("*.safetensors")}
    assert {name: file for file, tensors in held.items() for name in tensors} == expected
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in named)


def test_one_file_stays_one_and_no_name_leads_out_of_the_folder(tmp_path, like):
    named, index = trained(), like / "model.safetensors.index.json"

    def written(target):
        pieces = (piece for bucket in pack_buckets(named, 50_000) for piece in slices(bucket))
        target = tmp_path / target
        write_tensors(target, pieces, manifest=manifest_of(named), like=like, file_bytes=100_000)
        return {path.name for path in target.glob("*.safetensors")}

    index.write_text(json.dumps({"weight_map": {name: "../led.safetensors" for name, _ in named}}))
    assert len(written("out")) > 1
    assert [path.name for path in tmp_path.glob("*.safetensors")] == []
    index.unlink()
    assert written("one") == {"model.safetensors"}


def test_what_fails_leaves_the_old_one_and_takes_all_buckets(tmp_path, like):
    named = trained()
    buckets = pack_buckets(named, 50_000)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(ValueError, match=r"takes .* not"):
        write_directory(tmp_path / "out", buckets, manifest=manifest_of(named)[::-1], like=like)
    assert next(buckets, None) is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_no_bucket_is_kept(tmp_path, like):
    named, sent, alive = trained(), [], []

    def watched():
        for bucket in pack_buckets(named, 20_000):
            sent.append(weakref.ref(bucket.data))
            yield bucket
            del bucket
            alive.append(sum(bucket() is not None for bucket in sent))

    write_directory(tmp_path / "out", watched(), manifest=manifest_of(named), like=like)
    assert len(sent) > 10
    assert max(alive) <= 2, "the one that was written last, and the one that pack_buckets has just sent"


def test_a_directory_that_nobody_may_write_is_copied(tmp_path, like):
    for path in [*like.iterdir(), like]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    named = trained(torch.bfloat16)
    write_directory(tmp_path / "out", pack_buckets(named, 50_000), manifest=manifest_of(named), like=like)
    assert (tmp_path / "out").stat().st_mode & 0o700 == 0o700
    assert (tmp_path / "out" / "config.json").stat().st_mode & 0o200


@pytest.mark.parametrize("limit", [100, 30_000])
def test_a_full_disk_is_the_error_of_the_system_whoever_writes(tmp_path, like, limit):
    """Python, safetensors and tokenizers, which say it each in a way of its own."""
    named, target = trained(), tmp_path / "out"
    with file_size_limit(limit):
        for write in (
            lambda: write_directory(
                target, pack_buckets(named, 50_000), manifest=manifest_of(named), like=like
            ),
            lambda: save_model(model_of("qwen3"), tokenizer(), str(target)),
            lambda: write_untrained(target, model_of("qwen3").config, tokenizer()),
        ):
            refused = None
            try:
                write()
            except OSError as error:
                refused = error
            # A config and a tokenizer may fit.
            assert limit > 100 if refused is None else is_refused_write(refused), refused
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == ["like"]
