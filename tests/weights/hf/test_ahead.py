"""A saved folder has the layers that predict further ahead, whoever trained it, and copies are copies."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.weights.codec import manifest_of, pack_buckets
from agentrl.weights.hf.export import write_directory
from agentrl.weights.hf.tensors import TensorFiles

MAIN = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
AHEAD = ("eh_proj.weight", "mlp.up_proj.weight", "shared_head.norm.weight")
COPIES = {"embed_tokens.weight": MAIN[0], "shared_head.head.weight": MAIN[3]}


def tensors(names, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 3, generator=generator).to(dtype) for name in names}


@pytest.fixture
def like(tmp_path):
    folder = tmp_path / "like"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "torch_dtype": "float32"}))
    main = tensors(MAIN)
    copies = {f"model.layers.1.{name}": main[original].clone() for name, original in COPIES.items()}
    still = tensors(
        [f"model.layers.1.{name}" for name in AHEAD] + ["mtp.fc.weight", "model.mtp_layers.0.x"], seed=1
    )
    save_file(
        {**main, **copies, **still, "model.rotary.inv_freq": torch.ones(2)}, folder / "model.safetensors"
    )
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_did_not_learn_is_kept_and_copies_follow(tmp_path, like, dtype):
    before, learned = load_file(like / "model.safetensors"), tensors(MAIN, dtype, seed=2)
    named = list(learned.items())
    write_directory(tmp_path / "out", pack_buckets(named, 64), manifest=manifest_of(named), like=like)
    with TensorFiles(tmp_path / "out") as files:
        after = {name: files.read(name) for name in files.names}
    # What else a folder holds that its model does not have is left out, as it was.
    assert after.keys() == before.keys() - {"model.rotary.inv_freq"}
    for name, tensor in after.items():
        original = COPIES.get(name.removeprefix("model.layers.1."), name)
        expected = learned.get(original, before[name])
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def test_what_learned_is_not_overwritten(tmp_path, like):
    names = [*MAIN, *(f"model.layers.1.{name}" for name in AHEAD)]
    named = list(tensors(names, seed=3).items())
    write_directory(tmp_path / "out", pack_buckets(named, 64), manifest=manifest_of(named), like=like)
    with TensorFiles(tmp_path / "out") as files:
        assert all(torch.equal(files.read(name), tensor) for name, tensor in named)
        assert "mtp.fc.weight" in files.names
