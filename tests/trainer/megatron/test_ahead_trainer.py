"""A trainer whose layers that predict further ahead learn: what it publishes, saves and goes on from."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import ModelLoadError
from agentrl.losses import PolicyLoss
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.megatron.files.checkpoint import CheckpointReader
from agentrl.trainer.megatron.files.torch_dist import to_hugging_face, to_torch_dist
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import TorchPlan
from agentrl.weights.codec import bytes_of
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.tensors import TensorFiles
from agentrl.weights.torch_dist import TorchDist
from tests.trainer.megatron.ahead import copies, place_of, save_with
from tests.trainer.megatron.models import model_of
from tests.trainer.megatron.test_megatron_trainer import LAYOUTS, RecordingSink, learns, trainer_on
from tests.trainer.megatron.test_state import published, steps
from tests.trainer.tiny import tokenizer

pytestmark = pytest.mark.full

ON = {"enable_mtp_training": True}


def trainer_over(folder, layout="one", kind="deepseek_v3", *, changes=ON):
    """Over a model that has such a layer."""
    save_with(folder / "with", kind)
    sizes = {"ranks": 1} if layout == "one" else LAYOUTS[layout]
    models = {"old": str(folder / "with")}
    return trainer_on(folder, kind, PolicyLoss(), ref=False, models=models, changes=changes, **sizes)


def tensors_in(folder) -> dict[str, torch.Tensor]:
    with TensorFiles(folder) as files:
        return {name: files.read(name) for name in files.names}


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and bytes_of(first).tobytes() == bytes_of(second).tobytes()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("glm4_moe", "one"),
        ("deepseek_v3", "EP2"),
        ("deepseek_v3", "PP2"),
        ("mimo", "TP2+SP"),
        ("mimo", "PP2"),
    ],
)
async def test_they_are_loaded_published_and_saved_bit_for_bit_under_their_names(tmp_path, kind, layout):
    with trainer_over(tmp_path, layout, kind) as trainer:
        original = load_file(tmp_path / "with" / "model.safetensors")
        sink = RecordingSink()
        await trainer.publish(sink, version=0)
        assert sink.tensors.keys() == original.keys() - copies(kind).keys()
        assert all(same(tensor, original[name]) for name, tensor in sink.tensors.items())
        await trainer.save(str(tmp_path / "saved"))
        saved = tensors_in(tmp_path / "saved")
        assert saved.keys() == original.keys()
        assert all(same(tensor, original[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"])
async def test_they_learn_and_the_policy_is_the_same_with_and_without(tmp_path, kind):
    after, losses = [], []
    for changes in (ON, {}):
        folder = tmp_path / str(len(after))
        folder.mkdir()
        with trainer_over(folder, kind=kind, changes=changes) as trainer:
            metrics = [(await trainer.update(steps(number))).metrics for number in (0, 0, 0, 0)]
            await trainer.save(str(folder / "saved"))
        losses.append([step.pop("train/mtp_loss", None) for step in metrics])
        after.append((metrics, tensors_in(folder / "saved")))
    (with_them, saved), (without, still) = after
    # To the last bit, through clipping: the norm is the policy's own.
    assert with_them == without
    assert losses[1] == [None] * 4
    assert losses[0][-1] < losses[0][0] - 0.1
    original = load_file(tmp_path / "0" / "with" / "model.safetensors")
    begin, copied = place_of(model_of(kind), 0), copies(kind)
    assert any(name.startswith(begin) for name in saved.keys() - copied.keys())
    for name, tensor in saved.items():
        is_ahead = name.startswith(begin)
        learns_here = is_ahead and name not in copied and not name.endswith("correction_bias")
        assert same(tensor, still[name]) != learns_here, name
        assert same(still[name], original[name]) == (is_ahead and name not in copied) or "bias" in name, name
    for copy, of in copied.items():
        assert same(saved[copy], saved[of])
        assert not same(saved[copy], original[copy])


async def test_a_state_goes_on_under_another_layout(tmp_path):
    found = []
    for number, layout in enumerate(["EP2", "PP2", "EP2"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with trainer_over(folder, layout) as trainer:
            if number:
                await trainer.load_state(str(tmp_path / str(number - 1) / "state"))
            else:
                await trainer.update(steps(0))
            await (await trainer.save_state(str(folder / "state")))
            found.append(await published(trainer))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["glm4_moe", "mimo"])
async def test_the_torch_trainer_keeps_them_as_they_are(tmp_path, kind):
    save_with(tmp_path / "with", kind)
    learning = Learning(PolicyLoss(), learns(), 6)
    plan = TorchPlan(policy=learning, models={"old": str(tmp_path / "with")})
    trainer = await RankTrainer.started(InlineRank(), plan)
    await trainer.update(steps(0))
    await trainer.save(str(tmp_path / "saved"))
    await trainer.close()
    original, saved = load_file(tmp_path / "with" / "model.safetensors"), tensors_in(tmp_path / "saved")
    assert saved.keys() == original.keys()
    for name in original:
        if name.startswith(place_of(model_of(kind), 0)) and name not in copies(kind):
            assert same(saved[name], original[name]), name
    assert all(same(saved[copy], saved[of]) for copy, of in copies(kind).items())


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "mimo"])
def test_a_folder_without_them_is_refused(tmp_path, kind):
    save_model(model_of(kind), tokenizer(), str(tmp_path / "model"))
    with pytest.raises(
        ModelLoadError, match=r"has no layers that predict several tokens, or .* leave enable_mtp"
    ):
        CheckpointReader(tmp_path / "model", ahead=True)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", "mimo"])
def test_a_distributed_checkpoint_has_them_under_megatrons_names(tmp_path, kind):
    original = tensors_in(save_with(tmp_path / "with", kind))
    to_torch_dist(tmp_path / "with", tmp_path / "dist")
    keys = TorchDist.open(tmp_path / "dist").specs.keys()
    assert {"mtp.layers.0.enorm.weight", "mtp.layers.0.eh_proj.weight"} < keys
    inner = "linear_fc1" if kind == "mimo" else "experts.experts.linear_fc1"
    assert f"mtp.layers.0.transformer_layer.mlp.{inner}.weight" in keys
    like = save_with(tmp_path / "like", kind)
    (like / "model.safetensors").unlink()
    for number, folder in enumerate([tmp_path / "with", like]):
        to_hugging_face(tmp_path / "dist", folder, tmp_path / f"back{number}")
        back = tensors_in(tmp_path / f"back{number}")
        # Copies of embedding and head are those of the folder that it is made like.
        assert back.keys() == original.keys() - (copies(kind).keys() if number else set())
        assert all(same(tensor, original[name]) for name, tensor in back.items())
