"""Checkpoints of Megatron are read and written as Megatron-Core itself writes and reads them."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli import main
from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.files.torch_dist import to_hugging_face, to_torch_dist
from agentrl.trainer.megatron.model.families import FAMILIES
from agentrl.weights.hf.export import save_model
from agentrl.weights.torch_dist import Chunk, TorchDist, write_torch_dist
from tests.trainer.megatron.models import LINEAR, MIXTURES, checkpoint_of, model_of
from tests.trainer.megatron.together import Ranks
from tests.trainer.tiny import tokenizer

pytestmark = pytest.mark.full

NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def megatrons_own(kind: str, norms_apart: bool = False):
    """A GPTModel of Megatron's own layers, with the sizes of a tiny model."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from agentrl.trainer.megatron.model.shape import shape_of

    shape = shape_of(model_of(kind).config)
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        **shape.sizes,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
        gradient_accumulation_fusion=False,
    )
    qk_norm = bool(shape.sizes.get("qk_layernorm", False))
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None, qk_layernorm=qk_norm, normalization="RMSNorm"
    )
    if norms_apart:
        # As in the layers of TransformerEngine, which checkpoints are trained with.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return shape, GPTModel(
        config,
        spec,
        vocab_size=shape.dims(ranks).padded_vocab,
        max_sequence_length=128,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    )


@torch.no_grad()
def saved(
    layout: MegatronConfig,
    _rank: int,
    folder: str,
    kind: str,
    apart: bool = False,
    norms_apart: bool = False,
) -> None:
    """Runs in a rank: Megatron saves the model of a kind. apart: each layer has keys of its own."""
    from megatron.core import dist_checkpointing, parallel_state

    shape, model = megatrons_own(kind, norms_apart)
    weights = checkpoint_of(model_of(kind))
    ranks, rank = layout.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    placed = {each.megatron: each for each in shape.rules()}
    for name, parameter in model.named_parameters():
        own = placed[name.replace("local_experts.", "")]
        rule = own.rule
        whole = rule.join([weights[each] for each in own.hf], shape.dims(ranks))
        parameter.copy_(rule.cut(whole, ranks)[rank])
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": apart})
    dist_checkpointing.save({"model": state, "iteration": 7}, folder)


@torch.no_grad()
def loaded(layout: MegatronConfig, _rank: int, folder: str, kind: str) -> dict[str, torch.Tensor]:
    """Runs in a rank: what Megatron reads of a checkpoint, by its own names."""
    from megatron.core import dist_checkpointing

    _, model = megatrons_own(kind, kind in MIXTURES)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(state["model"])
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def directory(folder: Path, kind: str) -> Path:
    save_model(model_of(kind), tokenizer(), str(folder / "model"))
    return folder / "model"


@pytest.mark.parametrize(
    ("kind", "ranks", "apart"),
    [
        ("qwen3", 1, False),
        ("qwen3", 2, False),
        ("qwen2", 2, False),
        ("llama", 2, True),
        ("mixtral", 2, False),
    ],
)
def test_what_megatron_saves_is_read_bit_for_bit(tmp_path, kind, ranks, apart):
    layout = MegatronConfig(actor_num_gpus_per_node=ranks, tensor_model_parallel_size=ranks)
    with Ranks(ranks) as together:
        together.run(saved, layout, str(tmp_path / "iter_0000007"), kind, apart)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    like, out = directory(tmp_path, kind), tmp_path / "out"
    main(["convert", str(tmp_path), str(out), "--like", str(like)])
    expected, found = load_file(like / "model.safetensors"), load_file(out / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {path.name for path in like.iterdir()} == {path.name for path in out.iterdir()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "mixtral"])
def test_what_is_written_megatron_reads_bit_for_bit(tmp_path, kind):
    to_torch_dist(directory(tmp_path, kind), tmp_path / "out")
    layout = MegatronConfig(actor_num_gpus_per_node=1)
    with Ranks(1) as together:
        (found,) = together.run(loaded, layout, str(tmp_path / "out" / "release"), kind)
        together.run(saved, layout, str(tmp_path / "own"), kind, False, kind in MIXTURES)
    assert len(found) > 20
    own = TorchDist.open(tmp_path / "own")
    for name, tensor in found.items():
        layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
        rest, *expert = below(rest)
        is_before_experts = kind == "mixtral" and rest.startswith("pre_mlp")
        rest = rest if is_before_experts else NORMS.get(rest, rest)
        key = ("decoder.layers." + rest, int(layer), *expert) if layer.isdecimal() else (name,)
        assert torch.equal(own.read(*key), tensor), name


def below(name):
    """What is below a layer, and the expert's number."""
    head, is_expert, rest = name.partition(".local_experts.")
    number, _, rest = rest.partition(".")
    return (f"{head}.experts.{rest}", int(number)) if is_expert else (name,)


@pytest.mark.parametrize("kind", ["qwen3, tied", *sorted(FAMILIES.keys() - set(LINEAR))])
def test_a_model_goes_there_and_back(tmp_path, kind):
    like = directory(tmp_path, kind)
    main(["convert", str(like), str(tmp_path / "dist")])
    main(
        ["convert", str(tmp_path / "dist"), str(tmp_path / "back"), "--like", str(like)],
    )
    expected, found = (
        load_file(like / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    to_torch_dist(directory(folder, "qwen3"), folder / "dist")
    return folder


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (Path(self.marker),)


def copied(checkpoint, tmp_path):
    shutil.copytree(checkpoint / "dist", tmp_path / "dist")
    return tmp_path / "dist" / "release"


def test_nothing_of_a_checkpoint_is_run(checkpoint, tmp_path):
    release, marker = copied(checkpoint, tmp_path), tmp_path / "struck"
    (release / ".metadata").write_bytes(pickle.dumps({"a": Evil(marker)}))
    with pytest.raises(ModelLoadError, match="is not what Megatron writes"):
        TorchDist.open(release)
    buffer = io.BytesIO()
    torch.save(Evil(marker), buffer)
    release = copied(checkpoint, tmp_path / "2")
    data = bytearray((release / "__0_0.distcp").read_bytes())
    data[: len(buffer.getvalue())] = buffer.getvalue()
    (release / "__0_0.distcp").write_bytes(data)
    with pytest.raises(ModelLoadError, match="is cut short or damaged"):
        TorchDist.open(release).read("embedding.word_embeddings.weight")
    assert not marker.exists()


def test_damage_is_named(checkpoint, tmp_path):
    like = checkpoint / "model"
    release = copied(checkpoint, tmp_path)
    data = (release / "__0_0.distcp").read_bytes()
    (release / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"__0_0.distcp is cut short or damaged \(.*\); copy it again"):
        to_hugging_face(tmp_path / "dist", like, tmp_path / "out")
    (release / "__0_0.distcp").write_bytes(data)
    with pytest.raises(
        ModelLoadError, match=r"lacks decoder.layers.0.self_attention.linear_qkv.bias; is it of another"
    ):
        to_hugging_face(tmp_path / "dist", directory(tmp_path / "other", "qwen2"), tmp_path / "out")
    metadata = (release / ".metadata").read_bytes()
    outside = metadata.replace(b"__0_0.distcp", b"../../x.tcp1")
    (release / ".metadata").write_bytes(outside)
    with pytest.raises(ModelLoadError, match=r"'../../x.tcp1' is no file of the folder"):
        TorchDist.open(release)
    (release / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    with pytest.raises(ModelLoadError, match=r".metadata is not what Megatron writes \(.*\); copy it again"):
        TorchDist.open(release)
    assert not (tmp_path / "out").exists()


def test_linear_attention_is_one_sentence_either_way(tmp_path):
    like = directory(tmp_path, "qwen3_next")
    message = "is of a model with linear attention, whose distributed checkpoints agentrl neither reads nor"
    with pytest.raises(ModelLoadError, match=message):
        to_torch_dist(like, tmp_path / "out")
    with pytest.raises(ModelLoadError, match=message):
        to_hugging_face(tmp_path, like, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_damage_is_a_traceback(checkpoint, tmp_path):
    release = copied(checkpoint, tmp_path)
    metadata, rng = (release / ".metadata").read_bytes(), random.Random(0)
    for _ in range(400):
        damaged = bytearray(metadata)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (release / ".metadata").write_bytes(damaged)
        with suppress(ModelLoadError):
            opened = TorchDist.open(release)
            opened.read("embedding.word_embeddings.weight")
            opened.read("decoder.layers.mlp.linear_fc2.weight", 1)
    (release.parent / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match="is not what Megatron writes"):
        TorchDist.open(release.parent)


@pytest.mark.parametrize(
    ("offset", "sentence"),
    [((96, 0), "a chunk of x is outside of it"), ((0, 0), "are not all of it, each once")],
)
def test_chunks_are_all_of_a_tensor_each_once(tmp_path, offset, sentence):
    half = torch.ones(49, 48)
    chunks = [Chunk("x", (98, 48), place, half) for place in ((0, 0), offset)]
    write_torch_dist(tmp_path / "dist", chunks)
    with pytest.raises(ModelLoadError, match=sentence):
        TorchDist.open(tmp_path / "dist")
