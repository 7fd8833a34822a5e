"""Quantized directories are the models that their numbers stand for; other readers agree with ours."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import FineGrainedFP8Config

from agentrl.cli import main
from agentrl.errors import ModelLoadError
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.adapters import LowRank
from agentrl.weights.hf.casting import cast_directory, dequantize_directory
from agentrl.weights.hf.export import save_adapters
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.quantized import quantized_model, scheme_of
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import TensorFiles
from tests.engine.serving import sglang_python
from tests.trainer.tiny import tokenizer
from tests.weights.hf.quantizing import model_of, rounded_by

CASTS = ["fp8", "fp8-tensor", "int4"]
KINDS = ["qwen3", "qwen3_moe"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The directory of a model, by its kind and its dtype."""
    folders = {}

    def directory(kind="qwen3", dtype=torch.bfloat16):
        if (kind, dtype) not in folders:
            folder = folders[kind, dtype] = tmp_path_factory.mktemp("models") / kind
            model_of(kind).to(dtype).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
        return folders[kind, dtype]

    return directory


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def with_config(folder, **changes):
    fields = config_of(folder)
    fields["quantization_config"] = {**fields["quantization_config"], **changes}
    (folder / "config.json").write_text(json.dumps(fields))


def stored_in(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_directory_loads_as_the_rounded_model(tmp_path, plain, cast, kind, dtype):
    source, target = plain(kind, dtype), tmp_path / "cast"
    number = cast_directory(source, target, cast)
    opened = open_directory(target, torch.float32)
    loaded, original = dict(named_weights(opened)), dict(named_weights(open_directory(source, torch.float32)))
    changed = set()
    for name, tensor in original.items():
        is_cast = f"{name}_packed" in stored_in(target) or stored_in(target)[name].itemsize == 1
        expected = rounded_by(tensor.numpy(), cast, dtype) if is_cast else tensor
        assert torch.equal(loaded[name], expected), name
        changed |= {name} if is_cast else set()
    assert len(changed) == number
    parts = {name.rsplit(".", 2)[-2] for name in changed}
    experts = {"gate_proj", "up_proj", "down_proj"}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert parts == (experts if cast == "int4" and kind != "qwen3" else experts | attention)
    assert opened.config.to_dict().get("quantization_config") is None
    assert opened.name_or_path == str(target)
    assert (
        opened.generation_config.eos_token_id == open_directory(source, dtype).generation_config.eos_token_id
    )
    described = config_of(target)["quantization_config"]
    left = described["ignore"] if cast == "int4" else described["modules_to_not_convert"]
    assert "lm_head" in left
    assert not {f"{name}.weight" for name in left} & changed


@pytest.mark.parametrize("cast", CASTS)
def test_a_quantized_directory_becomes_a_plain_one(tmp_path, plain, cast):
    source = plain("qwen3_moe")
    cast_directory(source, tmp_path / "cast", cast)
    dequantize_directory(tmp_path / "cast", tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert config_of(tmp_path / "plain") == config_of(source)
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").named_parameters())
    for name, tensor in open_directory(tmp_path / "cast", torch.bfloat16).named_parameters():
        assert torch.equal(tensor, theirs[name]), name
    # What is cast a second time is the same.
    cast_directory(tmp_path / "plain", tmp_path / "again", cast)
    cast_directory(tmp_path / "cast", tmp_path / "directly", cast)
    first, *others = (stored_in(tmp_path / name) for name in ("cast", "again", "directly"))
    for other in others:
        assert all(torch.equal(first[name].float(), other[name].float()) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_block_fp8_as_we_do(tmp_path, kind, dtype):
    # It takes the rows for as many equal blocks as there are scales.
    model_of(kind, hidden_size=256, intermediate_size=256).to(dtype).save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    cast_directory(tmp_path / "plain", tmp_path / "fp8", "fp8")
    dequantizing = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=dtype, quantization_config=dequantizing
    )
    ours = open_directory(tmp_path / "fp8", dtype)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, other), name


THEIRS = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
folder = sys.argv[1]
stored = load_file(folder + "/model.safetensors")
result = {}
for name in [n.removesuffix("_packed") for n in stored if n.endswith("_packed")]:
    shape = torch.Size(stored[name + "_shape"].tolist())
    numbers = unpack_from_int32(stored[name + "_packed"], 4, shape)
    assert torch.equal(pack_to_int32(numbers, 4), stored[name + "_packed"]), name
    scales = stored[name + "_scale"].repeat_interleave(32, 1)
    result[name] = (numbers.float() * scales.float()).to(scales.dtype)
    other = torch.randint(-8, 8, shape, dtype=torch.int8)
    result[name + "_numbers"], result[name + "_packed"] = other, pack_to_int32(other, 4)
save_file(result, folder + "/theirs.safetensors")
"""


@pytest.mark.full
def test_compressed_tensors_reads_int4_as_we_do_and_packs_as_we_read(tmp_path, plain):
    target = tmp_path / "int4"
    cast_directory(plain("qwen3"), target, "int4")
    subprocess.run([sglang_python(), "-c", THEIRS, target], check=True)
    theirs, stored = load_file(target / "theirs.safetensors"), stored_in(target)
    names = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    assert names
    with TensorFiles(target) as files:
        for name in names:
            assert torch.equal(files.read(name), theirs[name]), name
    for name in names:
        stored[f"{name}_packed"] = theirs[f"{name}_packed"]
    (target / "theirs.safetensors").unlink()
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    with TensorFiles(target) as files:
        for name in names:
            scales = stored[f"{name}_scale"].repeat_interleave(32, 1)
            expected = (theirs[f"{name}_numbers"].float() * scales.float()).bfloat16()
            assert torch.equal(files.read(name), expected), name


def test_scales_of_activations_are_no_part_of_the_model(tmp_path, plain):
    target = tmp_path / "fp8"
    cast_directory(plain(), target, "fp8-tensor")
    tensors = stored_in(target)
    scales = {
        f"{name}_scale".replace("weight", "input"): torch.ones(())
        for name in tensors
        if is_fp8(tensors, name)
    }
    save_file({**tensors, **scales}, target / "model.safetensors", {"format": "pt"})
    with_config(target, activation_scheme="static")
    dequantize_directory(target, tmp_path / "plain")
    assert stored_in(tmp_path / "plain").keys() == stored_in(plain()).keys()


def is_fp8(tensors, name):
    return tensors[name].itemsize == 1


def test_adapters_over_a_quantized_model_are_added_to_what_its_numbers_stand_for(tmp_path, plain):
    base = tmp_path / "int4"
    cast_directory(plain("qwen3", torch.float32), base, "int4")
    before = dict(named_weights(open_directory(base, torch.float32)))
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = before[f"{name}.weight"].shape
    learned = LowRank(torch.randn(2, columns), torch.randn(rows, 2), 0.5)
    save_adapters(tmp_path / "adapters", {name: learned}, like=base)
    assert quantized_model(str(base)) == str(base)
    assert quantized_model(str(tmp_path / "adapters")) is None, "engines serve the sum"
    expected = before[f"{name}.weight"] + 0.5 * learned.b @ learned.a
    main(["convert", str(tmp_path / "adapters"), str(tmp_path / "merged")])
    assert "quantization_config" not in config_of(tmp_path / "merged")
    for folder in ("adapters", "merged"):
        opened = dict(named_weights(open_directory(tmp_path / folder, torch.float32)))
        torch.testing.assert_close(opened[f"{name}.weight"], expected)
        assert all(torch.equal(opened[n], before[n]) for n in before if n != f"{name}.weight")
    main(["convert", str(tmp_path / "adapters"), str(tmp_path / "fp8"), "--cast", "fp8"])
    with TensorFiles(tmp_path / "fp8") as files:
        rounded = rounded_by(expected.numpy(), "fp8", torch.float32)
        torch.testing.assert_close(files.read(f"{name}.weight"), rounded, rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(("shape", "strategy"), [((), "tensor"), ((1,), "tensor"), (None, "channel")])
def test_fp8_by_compressed_tensors_is_read(tmp_path, plain, shape, strategy):
    target = tmp_path / "fp8"
    cast_directory(plain(), target, "fp8-tensor")
    tensors = stored_in(target)
    names = [name for name, tensor in tensors.items() if tensor.itemsize == 1]
    for name in names:
        rows, scale = len(tensors[name]), tensors[f"{name}_scale"]
        scales = torch.rand(rows, 1) + 0.5 if shape is None else scale.reshape(shape)
        tensors[f"{name}_scale"] = scales.bfloat16()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    with_config(
        target,
        quant_method="compressed-tensors",
        format="float-quantized",
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {}}},
    )
    with TensorFiles(target) as files:
        for name in names:
            expected = (tensors[name].float() * tensors[f"{name}_scale"].float()).bfloat16()
            assert torch.equal(files.read(name), expected), name
            assert files.spec(name, tuple(expected.shape)).dtype == "bfloat16"
        assert files.names == {name for name in tensors if not name.endswith("_scale")}


# As their config.json files have it.
PUBLISHED = {
    "DeepSeek-V3": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "DeepSeek-V3.1": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "Kimi-K2-Thinking": {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}


def test_what_is_published_is_understood(tmp_path):
    found = {}
    for name, fields in PUBLISHED.items():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fields}))
        scheme = scheme_of(tmp_path)
        found[name] = (scheme.grid, scheme.block, scheme.rounds_up, scheme.is_block_fp8)
    assert found == {
        "DeepSeek-V3": ("fp8", (128, 128), False, True),
        "DeepSeek-V3.1": ("fp8", (128, 128), True, True),
        "Kimi-K2-Thinking": ("int4", (1, 32), False, False),
    }


GROUP = PUBLISHED["Kimi-K2-Thinking"]["config_groups"]["group_0"]


def of_group(**changes):
    return {"group_0": {**GROUP, "weights": {**GROUP["weights"], **changes}}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_method": "awq"}, "quantized by awq, and only fp8 and compressed-tensors"),
        ({"quant_method": "mxfp4"}, "quantized by mxfp4"),
        ({"fmt": "e5m2"}, "by fp8 in a way that is not read here"),
        ({"quant_method": "compressed-tensors"}, "by compressed-tensors in a way that is not read here"),
        *(
            ({**PUBLISHED["Kimi-K2-Thinking"], "config_groups": of_group(**group)}, "compressed-tensors")
            for group in ({"symmetric": False}, {"num_bits": 8}, {"actorder": "group"}, {"type": "float"})
        ),
        ({"weight_block_size": [64, 64]}, "says blocks of \\[64, 64\\]; copy both"),
        ({"weight_block_size": [0, 64]}, "by fp8 in a way that is not read here"),
    ],
)
def test_what_is_not_read_is_one_sentence(tmp_path, plain, changes, says):
    target = tmp_path / "fp8"
    cast_directory(plain(), target, "fp8")
    with_config(target, **changes)
    # A server may read it.
    assert open_config(target).to_dict().get("quantization_config") is None
    with pytest.raises(ModelLoadError, match=says):
        open_directory(target, torch.float32)
    with pytest.raises(ModelLoadError, match=says):
        TensorFiles(target)


def test_damaged_directories_are_one_sentence(tmp_path, plain):
    target = tmp_path / "fp8"
    cast_directory(plain(), target, "fp8")
    whole = stored_in(target)
    name = next(name for name, tensor in whole.items() if tensor.itemsize == 1)
    save_file({k: v for k, v in whole.items() if k != f"{name}_scale_inv"}, target / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"quantizes {name}, and lacks its scales"):
        open_directory(target, torch.float32)
    save_file(
        {**whole, f"{name}_scale_inv": whole[f"{name}_scale_inv"] * torch.nan}, target / "model.safetensors"
    )
    with pytest.raises(ModelLoadError, match=f"not finite numbers, in {name}"):
        open_directory(target, torch.float32)


def test_an_engine_and_a_trainer_ask_for_no_scale(tmp_path, plain):
    target = tmp_path / "fp8"
    cast_directory(plain(), target, "fp8")
    with TensorFiles(plain()) as before, TensorFiles(target) as files:
        assert files.all_specs == before.all_specs
        assert files.names == before.names
        with pytest.raises(ModelLoadError, match="has no tensor"):
            files.read("model.layers.0.self_attn.q_proj.weight_scale_inv")


@pytest.mark.parametrize("cast", CASTS)
def test_the_command_casts_and_casts_back(tmp_path, plain, cast, capsys):
    main(["convert", str(plain()), str(tmp_path / "cast"), "--cast", cast])
    assert capsys.readouterr().out.endswith(f"cast holds 14 matrices in {cast}.\n")
    main(["convert", str(tmp_path / "cast"), str(tmp_path / "plain")])
    assert "14 matrices of it from" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"cast", "plain"}
    with TensorFiles(tmp_path / "plain") as files:
        assert not files.matrices


def test_the_command_casts_model_directories_alone(tmp_path, capsys):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SystemExit) as end:
        main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--cast", "fp8"])
    assert end.value.code == 2
    assert "is no model directory, and --cast takes one" in capsys.readouterr().err
