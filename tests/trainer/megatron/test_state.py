"""A trainer goes on from what another one saved as if nothing had been between, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from agentrl.cli import main
from agentrl.errors import ConfigError, ModelLoadError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.files import saved
from agentrl.trainer.megatron.plan import Done, Learning, Plan
from agentrl.trainer.torch.checkpoint import save_model
from agentrl.weights.codec import bytes_of
from tests.trainer.megatron.models import model_of
from tests.trainer.megatron.test_megatron_trainer import LAYOUTS, Kept, learns, trainer_on
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, tokenizer

CASES = {
    "TP2, a critic": {"critic": True, **LAYOUTS["TP2"]},
    "DP2, a critic, bf16": {"critic": True, "bf16": True, **LAYOUTS["DP2"]},
    "DP2, a critic": {"critic": True, **LAYOUTS["DP2"]},
    "DP2, whole on every rank": {"use_distributed_optimizer": False, **LAYOUTS["DP2"]},
    "DP2, whole on every rank, bf16": {"use_distributed_optimizer": False, "bf16": True, **LAYOUTS["DP2"]},
    "CP2": LAYOUTS["CP2"],
    "PP2, virtual, tied": {"kind": "qwen3, tied", **LAYOUTS["PP2, virtual"]},
    "TP2+SP, networks that rest": {"offload": True, "critic": True, **LAYOUTS["TP2+SP"]},
}
QUICK = ("DP2, a critic, bf16",)


def steps(number: int):
    """Different ones, the second without a finite gradient."""
    told = with_returns(batch(seed=number))
    if number != 1:
        return told
    advantages = tuple(a * np.nan for a in told.credit.advantages)
    return replace(told, credit=replace(told.credit, advantages=advantages))


async def learn(trainer, numbers):
    return [(await trainer.update(steps(number))).metrics for number in numbers]


async def published(trainer) -> dict[str, bytes]:
    sink = Kept()
    await trainer.publish(sink, version=1)
    return {name: bytes_of(tensor).tobytes() for name, tensor in sink.tensors.items()}


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
async def test_it_goes_on_as_if_nothing_had_been_between(tmp_path, case):
    state = str(tmp_path / "state")
    with trainer_on(tmp_path, ref=False, **CASES[case]) as one:
        await learn(one, range(3))
        one.save_state(state)
        told = await learn(one, range(3, 6))
        weights = await published(one)
    with trainer_on(tmp_path, ref=False, **CASES[case]) as another:
        # It has a past of its own, which it forgets.
        await learn(another, [7])
        another.load_state(state)
        again = await learn(another, range(3, 6))
        assert await published(another) == weights
    assert again == told
    assert told[-1]["train/skipped_steps"] == 1
    assert told[-1]["train/lr"] < told[0]["train/lr"]


async def test_a_state_from_before_the_first_step(tmp_path):
    with trainer_on(tmp_path, ref=False, ranks=1) as one:
        one.save_state(str(tmp_path / "state"))
        told = await learn(one, [0])
    with trainer_on(tmp_path, ref=False, ranks=1) as another:
        await learn(another, [7])
        another.load_state(str(tmp_path / "state"))
        assert await learn(another, [0]) == told


async def test_what_is_saved_is_a_model_for_others(tmp_path):
    with trainer_on(tmp_path, ref=False, **LAYOUTS["PP2"]) as one:
        await learn(one, [0])
        one.save_state(str(tmp_path / "state"))
        one.save(str(tmp_path / "saved"))
    main(["convert", str(tmp_path / "state" / "policy"), str(tmp_path / "converted")])
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("saved", "converted")]
    assert files[0] == files[1]


async def test_a_rank_that_dies_while_it_saves_leaves_what_was_there(tmp_path, monkeypatch):
    state = tmp_path / "state"
    with trainer_on(tmp_path, ref=False, **LAYOUTS["TP2"]) as one:
        one.save_state(str(state))
        before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
        await learn(one, [0])
        os.kill(one.pids[1], signal.SIGSTOP)

        async def strike():
            while not (tmp_path / ".state.coming" / "policy" / "tensor-0").exists():
                await asyncio.sleep(0.01)
            os.kill(one.pids[1], signal.SIGKILL)

        striking = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(strike()))
        with pytest.raises(TrainerError, match=r"rank 1 .* was ended by SIGKILL"):
            one.save_state(str(state))
        await striking
    assert {path: path.read_bytes() for path in state.rglob("*") if path.is_file()} == before


def plan_of(folder, critic=False, **sizes) -> Plan:
    learning = Learning(PolicyLoss(), learns(), 6)
    return Plan(
        layout=MegatronConfig(actor_num_gpus_per_node=2, **sizes),
        policy=learning,
        models={"old": str(folder / "model")},
        critic=learning if critic else None,
    )


def test_what_does_not_fit_is_told(tmp_path):
    state, plan = tmp_path / "state", plan_of(tmp_path, **LAYOUTS["TP2"])
    save_model(model_of("qwen3"), tokenizer(), str(tmp_path / "model"))
    with pytest.raises(ModelLoadError, match=r"trainer.json cannot be read"):
        saved.opened(state, plan)
    saved.begin(state, plan)
    saved.finish(state, plan, 3, {"old": Done(3, 1)})
    assert saved.opened(state, plan) == (3, {"old": Done(3, 1)})
    for says, other in (
        ("was saved with tensor_model_parallel_size = 2, this trainer has 1", plan_of(tmp_path)),
        (
            "networks = policy, this trainer has critic and policy",
            plan_of(tmp_path, critic=True, **LAYOUTS["TP2"]),
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            saved.opened(state, other)
    (state / saved.ABOUT).write_text("{}")
    with pytest.raises(ModelLoadError, match="not as a trainer writes it"):
        saved.opened(state, plan)
