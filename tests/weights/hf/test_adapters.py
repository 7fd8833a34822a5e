"""Folders of adapters: what peft saves is read as peft reads it, and what is written here peft reads."""

from __future__ import annotations

import json
import os

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.errors import ModelLoadError
from agentrl.weights.hf.adapters import opened_adapters
from agentrl.weights.hf.export import merge_adapters, save_model, write_adapters
from agentrl.weights.hf.folders import base_folder, check_has_config
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import open_source
from agentrl.weights.hf.tensors import TensorFiles, num_parameters
from tests.trainer.families import family
from tests.trainer.tiny import tokenizer

IDS = torch.arange(12)[None] % 13


@pytest.fixture(params=["qwen3", "llama", "gpt2"])
def base(request, tmp_path):
    save_model(family(request.param).float(), tokenizer(), str(tmp_path / "base"))
    return tmp_path / "base"


def plain(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def by_peft(base, adapters, dtype=torch.float32):
    return PeftModel.from_pretrained(plain(base, dtype), adapters).eval()


def adapted(base, folder, seed=0, **config):
    """Adapters of random numbers, saved by peft."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"r": 3, "lora_alpha": 7, "target_modules": "all-linear", **config}
        model = get_peft_model(plain(base), LoraConfig(**options))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize(
    "config", [{}, {"use_rslora": True, "r": 5}, {"rank_pattern": {"c_attn": 2, "q_proj": 1}}]
)
def test_adapters_of_peft_are_read_as_peft_reads_them(base, tmp_path, config):
    folder = adapted(base, tmp_path / "a", **config)
    expected = by_peft(base, folder)
    # peft adds products where ours has one matrix: in fp32 these differ by some 2e-5.
    found = logits(open_directory(folder, torch.float32))
    torch.testing.assert_close(found, logits(expected), rtol=1e-4, atol=1e-4)
    merged = dict(expected.merge_and_unload().named_parameters())
    assert any(not torch.equal(merged[name], p) for name, p in plain(base).named_parameters())
    for name, parameter in open_directory(folder, torch.float32).named_parameters():
        assert torch.equal(parameter, merged[name]), name
    source = open_source(folder)
    assert num_parameters(source.config) == num_parameters(plain(base).config)
    assert source.encode("w3 w4") == open_source(base).encode("w3 w4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_that_of_peft(base, tmp_path, dtype):
    save_model(plain(base).to(dtype), tokenizer(), str(base))
    folder = adapted(base, tmp_path / "a")
    merge_adapters(folder, tmp_path / "merged")
    expected = by_peft(base, folder, dtype).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert found.dtype == dtype
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (tmp_path / "merged").iterdir()} == names


def test_adapters_on_top_of_others_are_written_as_one(base, tmp_path):
    """Their rank is the sum; a matrix that only one of them has is padded with 0."""
    some = [name for name, _ in plain(base).named_modules() if name.endswith(("q_proj", "c_attn"))]
    first = adapted(base, tmp_path / "first", use_rslora=True)
    merge_adapters(first, tmp_path / "merged")
    second = adapted(tmp_path / "merged", tmp_path / "second", seed=1, r=2, target_modules=some)
    (tmp_path / "both").mkdir()
    write_adapters(tmp_path / "both", opened_adapters(second).low_rank, like=first)
    expected = by_peft(tmp_path / "merged", second)
    for found in (by_peft(base, tmp_path / "both"), open_directory(tmp_path / "both", torch.float32)):
        torch.testing.assert_close(logits(found), logits(expected), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "both" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (5, str(base))


def changed(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def damaged(folder, change):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


FIRST = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
CASES = {
    "a name on the hub": (lambda f: changed(f, base_model_name_or_path="Qwen/Qwen3-8B"), "download that"),
    "no name": (lambda f: changed(f, base_model_name_or_path=None), "of 'no model', which is no folder"),
    "a zero byte": (lambda f: changed(f, base_model_name_or_path="a\0b"), "which is no folder"),
    "adapters of adapters": (lambda f: changed(f, base_model_name_or_path=str(f)), "config.json; download"),
    "DoRA": (lambda f: changed(f, use_dora=True), "has use_dora, and only plain LoRA"),
    "PiSSA": (lambda f: changed(f, init_lora_weights="pissa"), "has init_lora_weights = pissa"),
    "IA3": (lambda f: changed(f, peft_type="IA3"), "has peft_type = IA3"),
    "a module to import": (lambda f: changed(f, megatron_config={"a": 1}), "has megatron_config"),
    "no rank": (lambda f: changed(f, r=0), "is no configuration of adapters"),
    "no number": (lambda f: changed(f, lora_alpha=float("nan")), "is no configuration of adapters"),
    "no json": (lambda f: (f / "adapter_config.json").write_text("[" * 9999), "is no configuration of adap"),
    "huge": (
        lambda f: (f / "adapter_config.json").write_text(" " * (2 << 20)),
        "has more than 1,048,576 byt",
    ),
    "another rank": (lambda f: changed(f, r=4), "holds adapters of rank 3 for"),
    "no B": (lambda f: damaged(f, lambda t: t.pop(FIRST)), "holds no A and B of one rank for"),
    "a NaN": (lambda f: damaged(f, lambda t: t[FIRST].fill_(float("nan"))), "not finite numbers"),
    "something else": (lambda f: damaged(f, lambda t: t.update(x=torch.ones(1))), "holds x, and only plain"),
    "pickled": (lambda f: (f / "adapter_model.safetensors").unlink(), "nothing that was pickled is read"),
    "cut": (lambda f: os.truncate(f / "adapter_model.safetensors", 100), "is cut short or damaged"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_folder_of_adapters_is_one_sentence(tmp_path, name):
    save_model(family("qwen3").float(), tokenizer(), str(tmp_path / "base"))
    folder = adapted(tmp_path / "base", tmp_path / "a")
    change, sentence = CASES[name]
    change(folder)
    with pytest.raises(ModelLoadError) as caught:
        open_directory(folder, torch.float32)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError):
        TensorFiles(folder)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ModelLoadError, match="is no file"):
        check_has_config(tmp_path)


def test_another_model_is_refused_and_so_are_adapters_of_adapters(tmp_path):
    for name in ("qwen3", "llama"):
        save_model(family(name).float(), tokenizer(), str(tmp_path / name))
    folder = adapted(tmp_path / "qwen3", tmp_path / "a")
    other = family("qwen3", vocab=13)
    other.config.intermediate_size += 8
    save_model(type(other)(other.config), tokenizer(), str(tmp_path / "wider"))
    changed(folder, base_model_name_or_path=str(tmp_path / "wider"))
    for opened in (lambda: open_directory(folder, torch.float32), lambda: TensorFiles(folder)):
        with pytest.raises(ModelLoadError, match=r"adapts .*mlp.*, and its base model has \["):
            opened()
    changed(folder, base_model_name_or_path=str(adapted(tmp_path / "llama", tmp_path / "b")))
    (tmp_path / "b" / "config.json").write_text((tmp_path / "llama" / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="which holds adapters, too; merge those"):
        base_folder(folder)
