"""A state goes to other layouts, and to the other trainer, and comes back with the same bits."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError, ModelLoadError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import TorchPlan
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.opening import open_tensors, specs_in
from tests.trainer.megatron.models import model_of
from tests.trainer.megatron.test_megatron_trainer import CRITIC, LAYOUTS, learns, trainer_on
from tests.trainer.megatron.test_state import FROZEN, MUON, ON_CPU, published, steps
from tests.trainer.tiny import batch, tokenizer

pytestmark = pytest.mark.full

TORCH = "torch"


@asynccontextmanager
async def a_trainer(folder, layout, kind="qwen3", *, bf16=False, critic=True, ref=True, changes=()):
    """Of this layout, or torch's, over the model of a kind. It has a past of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout != TORCH:
        sizes = {"ranks": 1} if layout == "one" else dict(LAYOUTS[layout])
        sizes |= {"critic": critic, "ref": ref, "bf16": bf16, "changes": changes}
        with trainer_on(folder, kind, PolicyLoss(), **sizes) as trainer:
            yield trainer
        return
    how = {"bf16": bf16, **dict(changes)}
    model = folder / "model"
    save_model(model_of(kind), tokenizer(), str(model))
    plan = TorchPlan(
        policy=Learning(PolicyLoss(), learns(**how), 6),
        models={"old": str(model), **({"ref": str(model)} if ref else {})},
        critic=Learning(CRITIC, learns(**how, lr=3e-2), 6) if critic else None,
        critic_warmup=1,
        moves_reference=ref,
    )
    trainer = await RankTrainer.started(InlineRank(), plan)
    yield trainer
    await trainer.close()


async def trained(trainer, folder, numbers, *, ref=True):
    """The state after some steps, in a folder."""
    for number in numbers:
        await trainer.update(steps(number))
    if ref:
        await trainer.move_reference(0.25)
    await (await trainer.save_state(str(folder)))


def tensors_in(state):
    """Every tensor of a state's files: of the shards and of the optimizers."""
    found = {}
    for path in sorted(state.rglob("*.safetensors")):
        with open_tensors(path) as opened:
            for name in specs_in(opened):
                found[str(path.relative_to(state)), name] = opened.get_tensor(name)
    return found


ROUND_TRIPS = {
    "TP2 over DP2": ("TP2", "DP2", {}),
    "TP2 over PP2 and torch": ("TP2", "PP2, virtual", {}),
    "PP2 over CP2, tied": ("PP2", "CP2", {"kind": "qwen3, tied"}),
    "TP2 over one, bf16": ("TP2", "one", {"bf16": True}),
    "DP2 over TP2, bf16, biases": ("DP2", "TP2", {"bf16": True, "kind": "qwen2"}),
    "DP2 over torch": ("DP2", TORCH, {}),
    "EP2 over ETP2, experts in one tensor": ("EP2", "ETP2, biases", {"kind": "gpt_oss"}),
    "EP2 over torch, experts in one tensor": ("EP2", TORCH, {"kind": "gpt_oss"}),
    "TP2 over DP2, muon, bf16": ("TP2", "DP2", {"changes": MUON, "bf16": True}),
    "DP2 over torch, muon": ("DP2", TORCH, {"changes": MUON}),
    "DP2 over TP2, on the CPU, bf16": ("DP2", "TP2", {"changes": ON_CPU, "bf16": True}),
    "DP2 over torch, on the CPU": ("DP2", TORCH, {"changes": ON_CPU}),
    "TP2 over torch, some frozen": ("TP2", TORCH, {"changes": FROZEN}),
    "EP2 over TP2, experts": ("EP2", "TP2+SP", {"kind": "qwen3_moe"}),
    "EP2 over torch, experts": ("EP2", TORCH, {"kind": "qwen3_moe"}),
    "TP2 over torch, one tensor for both halves": ("TP2", TORCH, {"kind": "glm4"}),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
async def test_a_state_comes_back_with_the_same_bits(tmp_path, case):
    home, away, how = ROUND_TRIPS[case]
    async with a_trainer(tmp_path / "a", home, **how) as trainer:
        await trained(trainer, tmp_path / "first", range(3))
    async with a_trainer(tmp_path / "b", away, **how) as trainer:
        await trained(trainer, tmp_path / "forgotten", [5])
        await trainer.load_state(str(tmp_path / "first"))
        await (await trainer.save_state(str(tmp_path / "away")))
    async with a_trainer(tmp_path / "c", home, **how) as trainer:
        await trained(trainer, tmp_path / "forgotten", [4])
        await trainer.load_state(str(tmp_path / "away"))
        await (await trainer.save_state(str(tmp_path / "again")))
    first, again = tensors_in(tmp_path / "first"), tensors_in(tmp_path / "again")
    assert first.keys() == again.keys()
    assert len(first) > 20
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    summaries = [json.loads((tmp_path / n / "trainer.json").read_text()) for n in ("first", "away", "again")]
    assert summaries[0] == summaries[2]
    assert summaries[1]["layout"] != summaries[0]["layout"]
    assert (summaries[1]["steps"], summaries[1]["done"]) == (summaries[0]["steps"], summaries[0]["done"])


GOES_ON = {
    "TP2 to torch": ("TP2", TORCH, {}),
    "torch to TP2": (TORCH, "TP2", {}),
    "torch to PP2, tied": (TORCH, "PP2", {"kind": "qwen3, tied"}),
    "TP2 to torch, tied": ("TP2", TORCH, {"kind": "qwen2"}),
    "PP2 to TP2+SP": ("PP2", "TP2+SP", {}),
    "TP2 to torch, some frozen": ("TP2", TORCH, {"changes": FROZEN}),
    "torch to PP2, some frozen": (TORCH, "PP2", {"changes": FROZEN}),
    "torch to EP2, experts": (TORCH, "EP2", {"kind": "qwen3_moe"}),
    "EP2 to torch, experts": ("EP2", TORCH, {"kind": "qwen3_moe"}),
    "CP2 to torch, rotated pairs": ("CP2", TORCH, {"kind": "glm4"}),
}


@pytest.mark.parametrize("case", GOES_ON)
async def test_another_trainer_goes_on_as_the_one_that_saved_it(tmp_path, case):
    """The next steps are compared: means at other places than their weights would give other ones."""
    home, away, how = GOES_ON[case]
    samples = batch().samples
    reports, weights, scores = [], [], []
    for place, layout in (("a", home), ("b", away)):
        async with a_trainer(tmp_path / place, layout, **how) as trainer:
            if place == "a":
                await trained(trainer, tmp_path / "state", range(3))
            else:
                await trained(trainer, tmp_path / "forgotten", [5])
                await trainer.load_state(str(tmp_path / "state"))
            reports.append([(await trainer.update(steps(n))).metrics for n in (3, 4)])
            scores.append(await trainer.score(samples, ("ref", "values")))
            weights.append(await published(trainer))
    for one, other in zip(*reports, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    one, other = ({name: np.frombuffer(data, np.float32) for name, data in mine.items()} for mine in weights)
    assert one.keys() == other.keys()
    for name, values in one.items():
        # A bias of the keys shifts all scores of a query alike, but for its rotated part: its gradient is
        # noise around 0, which AdamW makes as large as any.
        atol = 5e-3 if name.endswith("k_proj.bias") else 2e-5
        np.testing.assert_allclose(other[name], values, atol=atol, err_msg=name)
    for role in ("ref", "values"):
        for mine, theirs in zip(getattr(scores[0], role), getattr(scores[1], role), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


async def test_a_state_from_before_the_first_step_goes_elsewhere(tmp_path):
    async with a_trainer(tmp_path / "a", "TP2", critic=False, ref=False) as trainer:
        await (await trainer.save_state(str(tmp_path / "state")))
        weights = await published(trainer)
    async with a_trainer(tmp_path / "b", TORCH, critic=False, ref=False) as trainer:
        await trained(trainer, tmp_path / "forgotten", [5], ref=False)
        await trainer.load_state(str(tmp_path / "state"))
        assert await published(trainer) == weights


async def test_what_cannot_go_elsewhere_is_named(tmp_path):
    async with a_trainer(tmp_path / "a", "TP2", critic=False, ref=False) as trainer:
        await trained(trainer, tmp_path / "state", range(2), ref=False)
    (tmp_path / "state" / "policy" / "optimizer" / "rank-00001.safetensors").unlink()
    async with a_trainer(tmp_path / "b", TORCH, critic=False, ref=False) as trainer:
        with pytest.raises(ModelLoadError, match=r"policy lacks a part of \S+.exp_avg; copy it again"):
            await trainer.load_state(str(tmp_path / "state"))
    async with a_trainer(tmp_path / "c", "DP2", ref=False) as trainer:
        with pytest.raises(
            ConfigError, match="was saved with networks = policy, this trainer has critic and"
        ):
            await trainer.load_state(str(tmp_path / "state"))
    async with a_trainer(tmp_path / "d", "DP2", "qwen2", critic=False, ref=False) as trainer:
        with pytest.raises(TrainerError, match=r"lacks \S+linear_qkv.bias; it is of another model"):
            await trainer.load_state(str(tmp_path / "state"))
