"""A model goes to a Megatron directory and comes back bit by bit, a layer at a time, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.errors import ConfigError, ModelLoadError
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.files.checkpoint import Checkpoint
from agentrl.trainer.megatron.files.convert import Wish, convert
from agentrl.trainer.megatron.files.sharded import ShardedCheckpoint
from agentrl.weights import checksum, named_weights
from tests.house.source import ROOT
from tests.trainer.megatron.converting import silent
from tests.trainer.megatron.models import CONFIGS, SIZES, VOCAB, model_of
from tests.trainer.megatron.together import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYER_BYTES = 4 << 20


def saved(kind, folder, dtype="float32"):
    model = model_of(kind).to(DTYPES[dtype])
    model.save_pretrained(folder)
    return model


def converted(source, target, ranks=None, dtype=None):
    return convert(source, target, Wish(ranks, dtype), silent)


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(24)[None] * 5 % VOCAB).logits


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_is_the_same_bits(tmp_path, kind, dtype, ranks):
    model = saved(kind, tmp_path / "hf", dtype)
    there = converted(tmp_path / "hf", tmp_path / "megatron", ranks)
    back = converted(tmp_path / "megatron", tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == DTYPES[dtype]
        assert torch.equal(after[name], tensor), name
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "hf"))
    assert there == back._replace(direction="to Megatron")
    weights = list(named_weights(model))
    assert (back.direction, back.dtype, back.cast_from) == ("to Hugging Face", dtype, None)
    assert (back.tensors, back.bytes) == (len(weights), sum(tensor.nbytes for _, tensor in weights))
    assert back.checksum == checksum(weights)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron", "back"}


def test_a_rank_has_its_own_heads_rows_and_columns(tmp_path):
    weights = saved("qwen3", tmp_path / "hf").state_dict()
    converted(tmp_path / "hf", tmp_path / "megatron", 2)
    below = "model.layers.3."
    # Four heads in two groups of 16 channels: each rank has one group, two queries, its key, its value.
    q, k, v = (weights[f"{below}self_attn.{name}_proj.weight"] for name in "qkv")
    out = weights[below + "self_attn.o_proj.weight"]
    gate, up = (weights[f"{below}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    for rank in (0, 1):
        layer = load_file(tmp_path / "megatron" / f"tensor-{rank}" / "layer-00003.safetensors")
        wanted = {
            "self_attention.linear_qkv.weight": torch.cat(
                [q.split(32)[rank], k.split(16)[rank], v.split(16)[rank]]
            ),
            "self_attention.linear_proj.weight": out.split(32, dim=1)[rank],
            "mlp.linear_fc1.weight": torch.cat([gate.split(40)[rank], up.split(40)[rank]]),
            "mlp.linear_fc2.weight": weights[below + "mlp.down_proj.weight"].split(40, dim=1)[rank],
            "self_attention.q_layernorm.weight": weights[below + "self_attn.q_norm.weight"],
            "self_attention.k_layernorm.weight": weights[below + "self_attn.k_norm.weight"],
            "input_layernorm.weight": weights[below + "input_layernorm.weight"],
            "pre_mlp_layernorm.weight": weights[below + "post_attention_layernorm.weight"],
        }
        assert layer.keys() == {f"decoder.layers.3.{name}" for name in wanted}
        for name, tensor in wanted.items():
            assert torch.equal(layer[f"decoder.layers.3.{name}"], tensor), name
        # 97 rows and one of zeros.
        embedding = load_file(tmp_path / "megatron" / f"tensor-{rank}" / "embedding.safetensors")
        rows = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(1, 48)])
        assert torch.equal(embedding["embedding.word_embeddings.weight"], rows.split(49)[rank])
        head = load_file(tmp_path / "megatron" / f"tensor-{rank}" / "head.safetensors")
        assert head.keys() == {"decoder.final_layernorm.weight", "output_layer.weight"}
    assert json.loads((tmp_path / "megatron" / "megatron.json").read_text()) == {
        "format": 1,
        "dtype": "float32",
        "layout": {"tensor_model_parallel_size": 2},
    }


def compare(layout, rank, hf, megatron):
    """Inside a rank: how many of its parameters the directory has exactly so."""
    from megatron.core import parallel_state

    from agentrl.trainer.megatron.model.network import Network

    with Checkpoint(hf) as checkpoint:
        network = Network(checkpoint.shape, layout, bf16=False)
        network.load(checkpoint.read)
    sharded, place = ShardedCheckpoint(megatron), parallel_state.get_tensor_model_parallel_rank()
    pieces = list(network.pieces())
    assert [p.megatron for p, parameter in pieces if not torch.equal(sharded.read(p, place), parameter)] == []
    return len(pieces)


@pytest.mark.full
def test_the_shards_are_what_a_rank_loads(tmp_path):
    layout = MegatronConfig(tensor_model_parallel_size=2, actor_num_gpus_per_node=2)
    with Ranks(2) as ranks:
        for kind in ("glm4", "qwen3, tied"):
            saved(kind, tmp_path / kind / "hf")
            converted(tmp_path / kind / "hf", tmp_path / kind / "megatron", 2)
            count = len(list(ShardedCheckpoint(tmp_path / kind / "megatron").shape.rules()))
            paths = (str(tmp_path / kind / name) for name in ("hf", "megatron"))
            assert ranks.run(compare, layout, *paths) == [count, count]


def test_a_cast_is_told_and_the_config_goes_along(tmp_path):
    model = saved("qwen3", tmp_path / "hf")
    there = converted(tmp_path / "hf", tmp_path / "bf16", 2, "bfloat16")
    assert (there.dtype, there.cast_from) == ("bfloat16", "float32")
    assert ShardedCheckpoint(tmp_path / "bf16").dtype == "bfloat16"
    converted(tmp_path / "bf16", tmp_path / "back")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, model.get_parameter(name).bfloat16()), name
    again = converted(tmp_path / "bf16", tmp_path / "fp32", dtype="float32")
    assert (again.dtype, again.cast_from) == ("float32", "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")
    for name, tensor in loaded.named_parameters():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, model.get_parameter(name).bfloat16().float()), name


def test_several_dtypes_need_a_word(tmp_path):
    model = saved("qwen3", tmp_path / "hf", "bfloat16")
    model.model.norm.float()
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"tensors of bfloat16 and float32, .* say which with --dtype"):
        converted(tmp_path / "hf", tmp_path / "megatron")
    there = converted(tmp_path / "hf", tmp_path / "megatron", dtype="float32")
    assert (there.dtype, there.cast_from) == ("float32", "bfloat16")


def test_a_tensor_that_would_be_lost_is_refused(tmp_path):
    saved("qwen3, tied", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    weights = load_file(path)
    # Written by older versions of transformers, and no loss.
    harmless = {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file(weights | harmless, path, {"format": "pt"})
    assert converted(tmp_path / "hf", tmp_path / "megatron").tensors == len(weights)
    save_file(weights | {"model.layers.0.extra.weight": torch.ones(8)}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 tensors .* model.layers.0.extra.weight among them"):
        converted(tmp_path / "hf", tmp_path / "again")


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def reconfigure(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shortened(path):
    os.truncate(path, path.stat().st_size // 2)


def widened(tensors):
    name = next(name for name in tensors if "norm" in name)
    tensors[name] = torch.ones(49)


LAYER = "tensor-1/layer-00002.safetensors"
DAMAGES = {
    "short": (LAYER, shortened, f"{LAYER} is cut short or damaged"),
    "empty": (LAYER, lambda path: path.write_bytes(b""), f"{LAYER} is cut short or damaged"),
    "gone": (LAYER, lambda path: path.unlink(), f"{LAYER} cannot be read .*; copy it again"),
    "shape": (
        LAYER,
        lambda path: rewrite(path, widened),
        rf"{LAYER} holds decoder.layers.2.\w+.weight as float32 \[49\], where the model has float32 \[48\]",
    ),
    "another layer": (
        LAYER,
        lambda path: path.write_bytes(path.with_name("layer-00001.safetensors").read_bytes()),
        rf"{LAYER} holds decoder.layers.1.\S+ as float32 \[48\], where the model has nothing",
    ),
    "dtype": (
        LAYER,
        lambda path: rewrite(path, lambda found: found.update({n: t.bfloat16() for n, t in found.items()})),
        rf"{LAYER} holds \S+ as bfloat16 .* where the model has float32",
    ),
    "json": ("megatron.json", shortened, r"megatron.json is not as .* writes it \(Invalid JSON"),
    "newer": (
        "megatron.json",
        lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 2')),
        r"megatron.json is not as .* \(format: Input should be 1\)",
    ),
    "ranks": (
        "megatron.json",
        lambda path: path.write_text(path.read_text().replace('size": 2', 'size": 3')),
        "megatron.json and hf/config.json disagree: tensor_model_parallel_size = 3 does not divide",
    ),
    "config": ("hf/config.json", lambda path: path.unlink(), "hf cannot be read"),
    "sizes": (
        "hf/config.json",
        lambda path: reconfigure(path, num_key_value_heads=0),
        r"hf/config.json makes no sense \(ZeroDivisionError: .*\); copy it again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_sentence_about_the_file(tmp_path, damage):
    saved("qwen3", tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "megatron", 2)
    file, harm, says = DAMAGES[damage]
    harm(tmp_path / "megatron" / file)
    with pytest.raises(ModelLoadError, match=says):
        converted(tmp_path / "megatron", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron"}


SOURCE_DAMAGES = {
    "short": (shortened, "model.safetensors is cut short or damaged"),
    "lacks": (
        lambda path: rewrite(path, lambda found: found.pop("model.norm.weight")),
        "has no tensor model.norm.weight; is it a whole model",
    ),
    "shape": (
        lambda path: rewrite(path, lambda found: found.update({"model.norm.weight": torch.ones(49)})),
        r"model.safetensors holds model.norm.weight as \[49\], its config.json says \[48\]",
    ),
    "gone": (lambda path: path.unlink(), "save the model with safetensors"),
    "index": (
        lambda path: path.with_name("model.safetensors.index.json").write_text("[]"),
        "model.safetensors.index.json is no index of tensors",
    ),
    "no part": (
        lambda path: path.with_name("model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'),
        "b cannot be read .*; copy it again",
    ),
}


NO_INDEX = "model.safetensors.index.json is no index of tensors"


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (
            '{"weight_map": {"a": 3}}',
            rf"{NO_INDEX} \(weight_map: a: Input should be a valid string\); copy it",
        ),
        ('{"weight_map": {"a": ["b"]}}', rf"{NO_INDEX} \(weight_map: a: .*\); copy it again"),
        ('{"weight_map": [["a", "b"]]}', rf"{NO_INDEX} \(weight_map: .*\); copy it again"),
        ('{"weight_map": 3}', NO_INDEX),
        ('{"metadata": {}}', rf"{NO_INDEX} \(weight_map: Field required\)"),
        ('{"weight_map": {"a', rf"{NO_INDEX} \(Invalid JSON"),
        ('{"weight_map": {"a": ""}}', "hf cannot be read .*; copy it again"),
        (None, "model.safetensors.index.json cannot be read .*; copy it again"),
    ],
)
def test_an_index_that_is_none_is_a_sentence(tmp_path, index, says):
    saved("qwen3", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    path.mkdir() if index is None else path.write_text(index)
    with pytest.raises(ModelLoadError, match=says):
        converted(tmp_path / "hf", tmp_path / "megatron")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_key_value_heads": 0}, "ZeroDivisionError"),
        ({"head_dim": -1}, "RuntimeError: .* negative dimension"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
            "ValueError: could not convert .*'x'",
        ),
        ({"rope_parameters": {"rope_theta": None}}, "TypeError"),
        ({"rope_parameters": 3}, ".*"),
        ({"hidden_size": "x"}, "field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
        ({"dtype": []}, "IndexError"),
        ({"dtype": 3}, "AttributeError"),
        ({"model_type": []}, "TypeError"),
    ],
)
def test_a_config_that_makes_no_sense_is_a_sentence(tmp_path, changes, says):
    saved("qwen3", tmp_path / "hf")
    reconfigure(tmp_path / "hf" / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=rf"hf/config.json makes no sense \(.*{says}.*\); copy it again"):
        converted(tmp_path / "hf", tmp_path / "megatron")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


@pytest.mark.parametrize("damage", SOURCE_DAMAGES)
def test_damage_of_a_hugging_face_directory_is_a_sentence(tmp_path, damage):
    saved("qwen3", tmp_path / "hf")
    harm, says = SOURCE_DAMAGES[damage]
    harm(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=says):
        converted(tmp_path / "hf", tmp_path / "megatron")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def in_a_process(*arguments):
    # Memory that is freed goes back at once, so that none of it counts later.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.trainer.megatron.converting", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("direction", ["there", "back"])
def test_killed_in_the_middle_leaves_no_target(tmp_path, direction):
    saved("qwen3", tmp_path / "hf")
    source, target = tmp_path / "hf", tmp_path / "out"
    if direction == "back":
        converted(tmp_path / "hf", tmp_path / "megatron")
        source = tmp_path / "megatron"
    there = {path.name for path in tmp_path.iterdir()}
    with in_a_process("stops", source, target) as process:
        said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert said == "in the middle\n"
    assert not target.exists()
    written = [path for path in tmp_path.rglob(".out.coming/**/*.safetensors") if path.stat().st_size]
    assert written, "it was in the middle of writing"
    converted(source, target)
    assert {path.name for path in tmp_path.iterdir()} == there | {"out"}


def large(folder, layers):
    """A model whose layers are of LAYER_BYTES each, and much larger than all else of it."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 1300, "num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=torch.float32)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert abs(layer - LAYER_BYTES) < LAYER_BYTES / 20
    model.save_pretrained(folder)


def test_one_layer_is_in_memory_at_a_time(tmp_path):
    paths = []
    # The first is not looked at: whatever grows only once has grown after it.
    for name, layers in (("first", 2), ("few", 4), ("many", 16)):
        large(tmp_path / name, layers)
        paths += [tmp_path / name, tmp_path / f"{name}-megatron"]
        paths += [tmp_path / f"{name}-megatron", tmp_path / f"{name}-back"]
    with in_a_process("measures", *paths) as process:
        grew = [int(line) for line in process.stdout]
    assert process.returncode == 0
    for few, many in zip(grew[2:4], grew[4:], strict=True):
        assert many - few < 2 * LAYER_BYTES, grew
        assert many < 4 * LAYER_BYTES, grew
