"""Types of models that transformers lacks open, by the files that their authors published."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import pytest
import tiktoken
import torch
from transformers.convert_slow_tokenizer import TikTokenConverter

from agentrl.errors import ModelLoadError
from agentrl.types import JSON
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import open_config, open_tokenizer
from agentrl.weights.hf.tensors import TensorFiles, meta_model, num_parameters, tensor_shapes
from tests.sizes import KIMI_K2, MIMO_7B
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import tokenizer

# Numbers of parameters; the page of MiMo-7B counts its layer that predicts further ahead, too.
PUBLISHED = {"kimi_k2": (KIMI_K2, 1.03e12), "mimo": (MIMO_7B, 7.62e9)}
NAMES = {
    "kimi_k2": (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.60.mlp.experts.383.down_proj.weight",
        "model.layers.60.mlp.shared_experts.up_proj.weight",
        "model.layers.60.self_attn.kv_a_proj_with_mqa.weight",
    ),
    "mimo": ("model.layers.35.self_attn.q_proj.bias", "model.layers.35.mlp.up_proj.weight", "lm_head.weight"),
}
# Chinese characters by themselves, then words, numbers and all else: a part of Kimi's.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    )
)


def written(folder, config: Mapping[str, JSON]):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_config_opens_and_its_model_has_the_published_names(tmp_path, kind):
    fields, number = PUBLISHED[kind]
    config = open_config(written(tmp_path, fields))
    assert config.model_type == kind
    assert type(meta_model(config)).__name__ == fields["architectures"][0]
    assert num_parameters(config) == pytest.approx(number, rel=0.01)
    assert set(NAMES[kind]) < tensor_shapes(config).keys()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_folder_is_loaded_without_its_python_files_and_saved_as_it_came(tmp_path, kind):
    model, folder = model_of(kind), tmp_path / "model"
    save_model(model, tokenizer(), str(folder))
    fields, auto_map = json.loads((folder / "config.json").read_text()), PUBLISHED[kind][0]["auto_map"]
    written(folder, {**fields, "auto_map": auto_map})
    for name in auto_map.values():
        (folder / f"{name.partition('.')[0]}.py").write_text("raise SystemExit('code of a folder ran')\n")
    opened = open_directory(folder, torch.float32)
    assert all(torch.equal(opened.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    save_model(opened, tokenizer(), str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == (kind, PUBLISHED[kind][0]["architectures"])
    with TensorFiles(folder) as before, TensorFiles(tmp_path / "saved") as after:
        assert after.all_specs == before.all_specs


def test_a_tokenizer_of_tiktokens_file_is_read_once_it_has_a_tokenizer_json(tmp_path):
    """As the folders of Moonlight and Kimi K2 are published, and as the sentence says."""
    folder = written(tmp_path, KIMI_K2)
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {pair: 256 + n for n, pair in enumerate([b" w", b"or", b"\xe4\xbd", b"12", b"or3"])}
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('code of a folder ran')\n")
    described = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(
        ModelLoadError, match=r"never run; write its tokenizer\.json once, .* take auto_map out"
    ):
        open_tokenizer(folder)

    special = {"[BOS]": len(ranks), "[EOS]": len(ranks) + 1}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    converter = TikTokenConverter(str(folder / "tiktoken.model"), PATTERN, extra_special_tokens=special)
    converter.converted().save(str(folder / "tokenizer.json"))
    del described["auto_map"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    tokenizer = open_tokenizer(folder)
    for text in ("hello world, it's 12345", "\u4f60\u597dworld or3", " w\n\n  x [EOS] 12"):
        expected = encoding.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert tokenizer.eos_token_id == special["[EOS]"]


def test_a_type_that_nobody_has_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"is of model type `kimi_k9`, which neither .* has"):
        open_config(written(tmp_path, {"model_type": "kimi_k9"}))
