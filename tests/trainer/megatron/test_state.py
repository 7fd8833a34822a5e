"""A trainer goes on from what another one saved as if nothing had been between, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError, ModelLoadError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer import saved
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Done, Learning
from agentrl.weights.codec import bytes_of
from agentrl.weights.hf.export import save_model
from tests.trainer.megatron.equality import share_of
from tests.trainer.megatron.models import checkpoint_of, model_of
from tests.trainer.megatron.test_megatron_trainer import LAYOUTS, RecordingSink, learns, trainer_on
from tests.trainer.megatron.together import Ranks
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, tokenizer

MUON = {"optimizer": "muon"}
ON_CPU = {"optimizer_cpu_offload": True}
FROZEN = {"freeze_params_name_list": ["embed_tokens", r"layers\.[02]\."]}
CASES = {
    "TP2, a critic": {"critic": True, **LAYOUTS["TP2"]},
    "DP2, a critic, bf16": {"critic": True, "bf16": True, **LAYOUTS["DP2"]},
    "DP2, a critic": {"critic": True, **LAYOUTS["DP2"]},
    "DP2, whole on every rank": {"use_distributed_optimizer": False, **LAYOUTS["DP2"]},
    "DP2, whole on every rank, bf16": {"use_distributed_optimizer": False, "bf16": True, **LAYOUTS["DP2"]},
    "CP2": LAYOUTS["CP2"],
    "PP2, virtual, tied": {"kind": "qwen3, tied", **LAYOUTS["PP2, virtual"]},
    "TP2, muon": {"changes": MUON, "critic": True, **LAYOUTS["TP2"]},
    "TP2, muon, linear": {"changes": MUON, "kind": "qwen3_5_text", **LAYOUTS["TP2"]},
    "DP2, muon, bf16": {"changes": MUON, "bf16": True, **LAYOUTS["DP2"]},
    "DP2, on the CPU, bf16": {"changes": ON_CPU, "bf16": True, "critic": True, **LAYOUTS["DP2"]},
    "PP2, some frozen, tied": {"changes": FROZEN, "kind": "qwen3, tied", **LAYOUTS["PP2"]},
    "PP2, a stage at rest": {
        "changes": {"only_train_params_name_list": [r"layers\.0\."]},
        **LAYOUTS["PP2"],
    },
    "DP2, some frozen, bf16": {"changes": FROZEN, "bf16": True, **LAYOUTS["DP2"]},
    "EP2": {"kind": "qwen3_moe", **LAYOUTS["EP2"]},
    "TP2+SP, experts on both": {"kind": "qwen3_moe", **LAYOUTS["TP2+SP, ETP1"]},
    "EP2, whole on every rank": {"kind": "qwen3_moe", "use_distributed_optimizer": False, **LAYOUTS["EP2"]},
    "TP2+SP, networks that rest": {"offload": True, "critic": True, **LAYOUTS["TP2+SP"]},
}


def steps(number: int):
    """Different ones, the second without a finite gradient."""
    train_batch = with_returns(batch(seed=number))
    if number != 1:
        return train_batch
    advantages = tuple(a * np.nan for a in train_batch.credit.advantages)
    return replace(train_batch, credit=replace(train_batch.credit, advantages=advantages))


async def learn(trainer, numbers):
    return [(await trainer.update(steps(number))).metrics for number in numbers]


async def published(trainer) -> dict[str, bytes]:
    sink = RecordingSink()
    await trainer.publish(sink, version=1)
    return {name: bytes_of(tensor).tobytes() for name, tensor in sink.tensors.items()}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
async def test_it_goes_on_as_if_nothing_had_been_between(tmp_path, case):
    state = str(tmp_path / "state")
    with trainer_on(tmp_path, ref=False, **CASES[case]) as trainer:
        await learn(trainer, range(3))
        writing = await trainer.save_state(state)
        # It trains on while its state is written.
        reports = await learn(trainer, range(3, 6))
        await writing
        weights = await published(trainer)
    with trainer_on(tmp_path, ref=False, **CASES[case]) as another:
        # It has a past of its own, which it forgets.
        await learn(another, [7])
        await another.load_state(state)
        again = await learn(another, range(3, 6))
        assert await published(another) == weights
    assert again == reports
    assert reports[-1]["train/skipped_steps"] == 1
    assert reports[-1]["train/lr"] < reports[0]["train/lr"]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["TP2", "PP2, virtual"])
async def test_a_reference_that_moves_is_a_part_of_the_state(tmp_path, layout):
    samples = batch().samples
    with trainer_on(tmp_path, **LAYOUTS[layout]) as trainer:
        before = (await trainer.score(samples, ("ref",))).ref
        await trainer.update(replace(steps(0), scores=replace(steps(0).scores, ref=before)))
        await trainer.move_reference(0.5)
        moved = (await trainer.score(samples, ("ref",))).ref
        await (await trainer.save_state(str(tmp_path / "state")))
    with trainer_on(tmp_path, **LAYOUTS[layout]) as another:
        await another.load_state(str(tmp_path / "state"))
        again = (await another.score(samples, ("ref",))).ref
    assert [a.tobytes() for a in again] == [a.tobytes() for a in moved]
    assert not any(np.allclose(a, b) for a, b in zip(before, moved, strict=True) if a.any())


@pytest.mark.full
async def test_a_batch_for_the_critic_alone_moves_no_policy(tmp_path):
    with trainer_on(tmp_path, ref=False, critic=True, **LAYOUTS["DP2"]) as trainer:
        weights = await published(trainer)
        first = await trainer.update(replace(steps(0), critic_only=True))
        assert await published(trainer) == weights
        # It counts for no warm-up, which is one step here.
        second, third = [await trainer.update(steps(0)) for _ in range(2)]
    assert ["train/pg_loss" in report.metrics for report in (first, second, third)] == [False, False, True]
    assert second.metrics["train/value_loss"] < first.metrics["train/value_loss"]


@pytest.mark.full
async def test_a_state_from_before_the_first_step(tmp_path):
    with trainer_on(tmp_path, ref=False, ranks=1) as trainer:
        await (await trainer.save_state(str(tmp_path / "state")))
        reports = await learn(trainer, [0])
    with trainer_on(tmp_path, ref=False, ranks=1) as another:
        await learn(another, [7])
        await another.load_state(str(tmp_path / "state"))
        assert await learn(another, [0]) == reports


class CountsByGroup(torch.optim.AdamW):
    """AdamW that counts its steps where Transformer Engine's and Apex's do."""

    def __init__(self, params, *, adam_w_mode, **how):
        assert adam_w_mode
        super().__init__(params, **how)

    def step(self, closure=None):
        for group in self.param_groups:
            done = group.get("step", 0)
            group["step"] = done + 1
            for parameter in group["params"]:
                if "step" in self.state[parameter]:
                    self.state[parameter]["step"].fill_(done)
        return super().step(closure)


def after_a_break(layout: MegatronConfig, _rank: int, folder, breaks: bool) -> dict[str, bytes]:
    """Runs in a rank: what is learned in three steps; with a break, the last in another learner."""
    from megatron.core import optimizer as megatron

    from agentrl.trainer.megatron.files import saving
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    def begun():
        model = model_of("qwen3")
        network = Network(shape_of(model.config), layout, bf16=False)
        network.load(checkpoint_of(model).__getitem__)
        return MegatronLearner(network, logprobs_of, Learning(PolicyLoss(), learns(), 10))

    megatron.Adam, megatron.USING_PYTORCH_OPTIMIZER = CountsByGroup, False
    learner = begun()
    for number in range(3):
        if breaks and number == 2:
            for file in saving.copies(folder, learner, torch.clone):
                file.write()
            done, learner = learner.optimizer.done, begun()
            saving.read(folder, learner, done)
        train_batch = batch(seed=number)
        learner.learn(share_of(layout, train_batch.samples), train_batch)
    return {name: tensor.detach().numpy().tobytes() for name, tensor in named_parameters(learner)}


def named_parameters(learner):
    return [(piece.placed.megatron, piece.parameter) for piece in learner.passes.network.pieces()]


@pytest.mark.full
def test_an_optimizer_that_counts_by_group_goes_on_too(tmp_path):
    layout = MegatronConfig(actor_num_gpus_per_node=1)
    with Ranks(1) as ranks:
        (through,) = ranks.run(after_a_break, layout, tmp_path, False)
        (broken,) = ranks.run(after_a_break, layout, tmp_path, True)
    assert broken == through


@pytest.mark.full
async def test_a_rank_that_dies_while_it_saves_leaves_what_was_there(tmp_path, monkeypatch):
    state = tmp_path / "state"
    with trainer_on(tmp_path, ref=False, **LAYOUTS["TP2"]) as trainer:
        await (await trainer.save_state(str(state)))
        before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
        await learn(trainer, [0])
        os.kill(trainer.ranks.pids[1], signal.SIGSTOP)

        async def strike():
            while not (tmp_path / ".state.coming" / "policy" / "tensor-0").exists():
                await asyncio.sleep(0.01)
            os.kill(trainer.ranks.pids[1], signal.SIGKILL)

        striking = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(strike()))
        with pytest.raises(TrainerError, match=r"rank 1 .* was ended by SIGKILL"):
            await (await trainer.save_state(str(state)))
        await striking
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before


def plan_of(folder, critic=False, **sizes) -> MegatronPlan:
    learning = Learning(PolicyLoss(), learns(), 6)
    return MegatronPlan(
        layout=MegatronConfig(actor_num_gpus_per_node=2, **sizes),
        policy=learning,
        models={"old": str(folder / "model")},
        critic=learning if critic else None,
    )


def test_what_does_not_fit_is_told(tmp_path):
    state, plan = tmp_path / "state", plan_of(tmp_path, **LAYOUTS["TP2"])
    save_model(model_of("qwen3"), tokenizer(), str(tmp_path / "model"))
    with pytest.raises(ModelLoadError, match=r"trainer.json cannot be read"):
        saved.read_summary(state, plan)
    state.mkdir()
    saved.write_summary(state, plan, 3, {"old": Done(3, 1)})
    summary = saved.read_summary(state, plan)
    assert (summary.steps, saved.done_of(summary)) == (3, {"old": Done(3, 1)})
    # Ranks of another layout read it in another way.
    assert saved.is_own(summary, plan)
    assert not saved.is_own(saved.read_summary(state, plan_of(tmp_path)), plan_of(tmp_path))
    other = plan_of(tmp_path, critic=True, **LAYOUTS["TP2"])
    with pytest.raises(ConfigError, match="networks = policy, this trainer has critic and policy"):
        saved.read_summary(state, other)
    text = (state / saved.ABOUT).read_text().replace("data_parallel_size", "replicas")
    (state / saved.ABOUT).write_text(text)
    with pytest.raises(ModelLoadError, match=r"is not as a trainer writes it \(layout\)"):
        saved.read_summary(state, plan)
    (state / saved.ABOUT).write_text("{}")
    with pytest.raises(ModelLoadError, match="not as a trainer writes it"):
        saved.read_summary(state, plan)
