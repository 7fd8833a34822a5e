"""An optimizer in the CPU's memory gives the weights of one on the device, bit for bit, and takes none there.

A parameter and its copy are two tensors here, too, though both are on the CPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.assembly.memory import Networks, torch_memory
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.offload import CpuAdamW
from tests.trainer.pool import Pool
from tests.trainer.sharded import Kind, Ranks, ranks_of
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, gradients_of, qwen3, settings, trainer

ON_CPU = {"optimizer_cpu_offload": True}
STEPS = {"lr": 1e-2, "lr_warmup_iters": 2, "weight_decay": 0.1, "clip_grad": 0.5}
CHANGES = {
    "all": {},
    "bf16": {"bf16": True},
    "adapters": {"lora_rank": 2, "bf16": True},
    "some frozen": {"freeze_params_name_list": ["embed_tokens", r"layers\.0\."]},
}


@pytest.fixture(scope="module")
def pair():
    with Pool(2) as pool:
        yield pool


def poisoned(train_batch):
    """Its gradient is not finite."""
    advantages = tuple(a * np.nan for a in train_batch.credit.advantages)
    return replace(train_batch, credit=replace(train_batch.credit, advantages=advantages))


BATCHES = [batch(0), poisoned(batch(1)), batch(2), batch(3)]


@pytest.mark.parametrize("case", CHANGES)
async def test_the_weights_are_the_same_bit_for_bit(case):
    models = [qwen3(torch.float32), qwen3(torch.float32)]
    before = {name: p.clone() for name, p in models[0].named_parameters()}
    reports, states = [], []
    for model, more in zip(models, ({}, ON_CPU), strict=True):
        learner = trainer(model, **STEPS, **CHANGES[case], **more)
        reports.append([(await learner.update(each)).metrics for each in BATCHES])
        states.append(learner._worker._policy.state())
        (optimizer,) = learner._worker._policy._optimizer.parts
        assert isinstance(optimizer, CpuAdamW) is bool(more)
    assert str(reports[0]) == str(reports[1])
    one, other = (dict(model.named_parameters()) for model in models)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], before.get(name, torch.empty(0))) for name in one)
    # The state is saved in one form.
    for number, saved in states[0]["optimizers"][0]["state"].items():
        assert states[1]["optimizers"][0]["state"][number].keys() == saved.keys()
        assert all(torch.equal(states[1]["optimizers"][0]["state"][number][k], saved[k]) for k in saved)


async def test_a_step_is_the_formula_in_float64():
    model, rate = qwen3(torch.float32), 1e-2
    learner = trainer(
        model, lr=rate, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-4, **ON_CPU
    )
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    means = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for number in range(1, 4):
        with gradients_of(model) as gradients:
            await learner.update(batch(number))
        for name, gradient in gradients.items():
            first, second = means[name]
            first.mul_(0.8).add_(0.2 * gradient.double())
            second.mul_(0.9).add_(0.1 * gradient.double() ** 2)
            decay = 0.1 if gradient.ndim == 2 else 0.0
            change = (first / (1 - 0.8**number)) / ((second / (1 - 0.9**number)).sqrt() + 1e-4)
            weights[name] = weights[name] * (1 - rate * decay) - rate * change
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-6)


async def test_no_tensor_of_it_is_on_the_device_or_moved_there():
    model = qwen3(torch.float32)
    learner = trainer(model, **ON_CPU)
    await learner.update(batch())
    assert list(learner._worker._policy.optimizer_tensors()) == []
    config = settings(**ON_CPU, device="cuda")
    whole = torch_memory(Networks(model.config), settings(device="cuda"), 16, 1, 2**30)
    spared = torch_memory(Networks(model.config), config, 16, 1, 2**30)
    assert spared == whole._replace(optimizer=0)
    (optimizer,) = learner._worker._policy._optimizer.parts
    there = [*optimizer.copies.values(), *(t for state in optimizer.state.values() for t in state.values())]
    learned = sum(p.numel() for p in model.parameters())
    assert sum(t.nbytes for t in there) == 12 * learned + 4 * len(optimizer.copies)


@pytest.mark.parametrize("saves", [{}, ON_CPU], ids=["from the device", "from the CPU"])
async def test_a_state_goes_on_in_the_other_place_bit_for_bit(tmp_path, saves):
    takes = {} if saves else ON_CPU
    first, second = (trainer(qwen3(torch.float32), **STEPS, **more) for more in (saves, takes))
    await first.update(batch(0))
    await second.update(batch(9))
    await (await first.save_state(str(tmp_path / "state")))
    await second.load_state(str(tmp_path / "state"))
    for learner in (first, second):
        await learner.update(batch(1))
    mine, theirs = (learner._worker.model.parameters() for learner in (first, second))
    assert all(map(torch.equal, mine, theirs))


def sharded(store, rank, ranks, kind, folder, reads):
    """Runs in a rank: the weights after two steps, of which a state is between; one may be read before."""
    from agentrl.trainer.plan import Done
    from agentrl.trainer.summary import SavedDone, SavedTrainer

    with ranks_of(store, rank, ranks) as shared:
        model = kind.model()
        worker = kind.worker(model, shared)
        worker.update(with_returns(batch(5 if reads else 0)))
        place = folder / kind.changes.get("optimizer_cpu_offload", False).__repr__()
        if reads:
            counts = SavedDone(steps=1, skipped=0)
            saved = SavedTrainer(
                dtype="float32", layout={"muon": 0}, steps=1, done={"policy": counts, "critic": counts}
            )
            worker.load(folder / repr(not kind.changes["optimizer_cpu_offload"]), saved)
        else:
            place.mkdir(exist_ok=True)
            assert worker.save(place)[1]["old"] == Done(1, 0)
            while not worker.is_written():
                pass
            torch.distributed.barrier()
        worker.update(with_returns(batch(1)))
        return {name: tensor.clone() for name, tensor in worker._published(model)}


@pytest.mark.parametrize("ranks", [Ranks(2, 2), Ranks(2, 1)], ids=["sharded", "replicated"])
def test_ranks_that_share_networks_do_the_same_and_read_each_others_states(pair, tmp_path, ranks):
    kinds = [
        Kind("qwen3", has_critic=True, changes={**STEPS, "optimizer_cpu_offload": on_cpu})
        for on_cpu in (False, True)
    ]
    for reads in (False, True):
        device, cpu = (pair.meet(sharded, ranks, kind, tmp_path, reads)[0] for kind in kinds)
        assert device.keys() == cpu.keys()
        assert all(torch.equal(device[name], cpu[name]) for name in device)


def test_muon_and_a_trainer_on_the_cpu_are_told():
    with pytest.raises(ValueError, match="optimizer_cpu_offload has no muon"):
        TrainerConfig(optimizer="muon", device="cuda", **ON_CPU)
    assert "optimizer_cpu_offload" in TrainerConfig(**ON_CPU).inactive
    assert "optimizer_cpu_offload" not in TrainerConfig(device="cuda", **ON_CPU).inactive
    assert "optimizer_cpu_offload" not in TrainerConfig(trainer="megatron", **ON_CPU).inactive
