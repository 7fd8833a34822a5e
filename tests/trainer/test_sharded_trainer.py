"""The torch trainer over several ranks in processes: what it reports, sends, saves, and how it ends."""

from __future__ import annotations

import os
import signal
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from agentrl.errors import TrainerError
from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning, Worker
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.loading import open_directory
from tests.trainer.test_processes import RecordingSink
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, qwen3, settings, tokenizer

BATCH = with_returns(batch(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(qwen3(torch.float32), tokenizer(), str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two ranks for all tests that leave them alive."""
    ranks = Processes(2, tmp_path_factory.mktemp("ranks"), preloaded=WORKER)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = Processes(4, tmp_path_factory.mktemp("ranks"), preloaded=WORKER)
    yield ranks
    ranks.close()


def plan_of(model, ranks=1, *, fsdp_size=None, **changes):
    """A policy, a critic and a reference that moves."""
    config = settings(lr=1e-2, max_tokens_per_gpu=20, **changes)
    adapts = "lora_rank" in changes
    return TorchPlan(
        policy=Learning(PolicyLoss(), config, 6),
        models={"old": model, "ref": model},
        critic=None if adapts else Learning(ValueLoss(), config, 6),
        moves_reference=not adapts,
        num_ranks=ranks,
        fsdp_size=fsdp_size,
    )


async def went_on(trainer):
    """Metrics of a step, and the weights afterwards."""
    metrics = (await trainer.update(BATCH)).metrics
    sink = RecordingSink()
    await trainer.publish(sink, version=1)
    return metrics, sink.tensors


async def begun(ranks, plan, folder):
    """A trainer after two steps, with its state in a folder, and what it did next."""
    trainer = await RankTrainer.started(ranks, plan)
    for _ in range(2):
        await trainer.update(BATCH)
    if plan.moves_reference:
        await trainer.move_reference(0.5)
    writing = await trainer.save_state(str(folder))
    # It trains on while its state is written.
    after = await went_on(trainer)
    await writing
    return trainer, after


async def resumed(ranks, plan, folder):
    """What a trainer does next that has loaded a state; it had a past of its own, which it forgets."""
    trainer = await RankTrainer.started(ranks, plan)
    await trainer.update(BATCH)
    await trainer.load_state(str(folder))
    return trainer, await went_on(trainer)


def near(one, other, changes=MappingProxyType({})):
    """Whether two trainers did the same, but for the order of their sums. Muon rounds to bfloat16."""
    atol = 5e-4 if "optimizer" in changes else 2e-6
    assert one[0] == pytest.approx(other[0], rel=500 * atol, abs=atol)
    assert [*one[1]] == [*other[1]]
    for name, data in one[1].items():
        weights = (np.frombuffer(each, np.float32) for each in (data, other[1][name]))
        np.testing.assert_allclose(*weights, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon"}, {"lora_rank": 2}], ids=str)
async def test_a_state_goes_on_under_another_number_of_ranks(model, pair, tmp_path, changes):
    one, two = plan_of(model, **changes), plan_of(model, 2, **changes)
    _, of_one = await begun(InlineRank(), one, tmp_path / "one")
    trainer, of_two = await begun(pair, two, tmp_path / "two")
    near(of_two, of_one, changes)
    scores = await trainer.score(BATCH.samples, ("old", "ref"))
    for ranks, plan, folder, expected in (
        (InlineRank(), one, "two", of_two),
        (pair, two, "one", of_one),
        (pair, plan_of(model, 2, fsdp_size=1, **changes), "two", of_two),
    ):
        _, after = await resumed(ranks, plan, tmp_path / folder)
        near(after, expected, changes)
    # The same ranks go on bit for bit.
    trainer, after = await resumed(pair, two, tmp_path / "two")
    assert after == of_two
    again = await trainer.score(BATCH.samples, ("old", "ref"))
    assert all(map(np.array_equal, again.proximal, scores.proximal))
    assert all(map(np.array_equal, again.ref, scores.ref))


@pytest.mark.full
@pytest.mark.parametrize("fsdp_size", [None, 2, 1])
async def test_a_state_of_one_or_two_ranks_goes_on_on_four_and_back(model, pair, four, tmp_path, fsdp_size):
    plans = {1: plan_of(model), 2: plan_of(model, 2), 4: plan_of(model, 4, fsdp_size=fsdp_size)}
    places = {1: InlineRank(), 2: pair, 4: four}
    after = {n: (await begun(places[n], plans[n], tmp_path / str(n)))[1] for n in plans}
    for source, target in ((1, 4), (2, 4), (4, 1), (4, 2)):
        near((await resumed(places[target], plans[target], tmp_path / str(source)))[1], after[source])
    assert (await resumed(four, plans[4], tmp_path / "4"))[1] == after[4]


async def test_scores_of_all_roles_come_back_in_the_order_of_the_batch(model, pair):
    inline = await RankTrainer.started(InlineRank(), plan_of(model))
    trainer = await RankTrainer.started(pair, plan_of(model, 2))
    expected, scores = [
        await each.score(BATCH.samples, ("old", "ref", "values"), statistics=True)
        for each in (inline, trainer)
    ]
    for name in ("proximal", "ref", "values", "entropy", "sum_pi_squared"):
        for own, of_one in zip(getattr(scores, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(own, of_one, atol=1e-5, err_msg=name)


async def test_all_ranks_help_with_buckets_and_what_is_saved_can_be_opened(model, pair, tmp_path):
    inline = await RankTrainer.started(InlineRank(), plan_of(model))
    trainer = await RankTrainer.started(pair, plan_of(model, 2))
    sinks = RecordingSink(), RecordingSink()
    for one, sink in zip((inline, trainer), sinks, strict=True):
        one.publisher._bucket_bytes = 2048
        await one.publish(sink, version=1)
    assert [*sinks[0].tensors.items()] == [*sinks[1].tensors.items()]
    assert sinks[0].checksum == sinks[1].checksum
    await trainer.save(str(tmp_path / "saved"))
    loaded = open_directory(tmp_path / "saved", torch.float32).state_dict()
    assert {name: loaded[name].numpy().tobytes() for name in sinks[0].tensors} == sinks[0].tensors


async def test_adapters_of_ranks_are_saved_and_sent_whole(model, pair, tmp_path):
    trainers = [
        await RankTrainer.started(place, plan_of(model, ranks, lora_rank=2))
        for place, ranks in ((InlineRank(), 1), (pair, 2))
    ]
    names = ("adapter_model.safetensors", "adapter_config.json")
    files = []
    for number, trainer in enumerate(trainers):
        await trainer.update(BATCH)
        await trainer.save(str(tmp_path / str(number)))
        files.append([(tmp_path / str(number) / name).read_bytes() for name in names])
    assert trainers[0].publisher.adapters == trainers[1].publisher.adapters != ()
    assert files[0][1] == files[1][1]
    own, shared = (load_file(tmp_path / str(number) / names[0]) for number in (0, 1))
    assert own.keys() == shared.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-6, msg=name)


async def test_a_stream_that_is_left_is_finished_by_all_ranks(model, pair):
    trainer = await RankTrainer.started(pair, plan_of(model, 2))
    buckets = pair.stream(Worker.weights, trainer.publisher.manifest, 2048)
    next(buckets)
    buckets.close()
    assert pair.call(Worker.manifest) == 2 * [trainer.publisher.manifest]


@pytest.mark.faults
async def test_a_rank_that_is_killed_is_named_and_the_other_is_ended(model, tmp_path):
    ranks = Processes(2, tmp_path / "ranks", preloaded=WORKER)
    trainer = await RankTrainer.started(ranks, plan_of(model, 2))
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(TrainerError, match=rf"rank 1 .*process {ranks.pids[1]}\) was ended by SIGKILL"):
        await trainer.update(BATCH)
    await trainer.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.pids)


class FailsInOne:
    """A loss that one rank cannot compute, while the other waits for its gradients."""

    def __call__(self, outputs, inputs):
        if dist.get_rank() == 1:
            raise ArithmeticError("no loss today")
        return PolicyLoss()(outputs, inputs)


async def test_a_rank_that_fails_is_named_though_the_other_waits_for_it(model, tmp_path):
    ranks = Processes(2, tmp_path / "ranks", preloaded=WORKER)
    plan = TorchPlan(policy=Learning(FailsInOne(), settings(), 6), models={"old": model}, num_ranks=2)
    trainer = await RankTrainer.started(ranks, plan)
    with pytest.raises(TrainerError, match=r"rank 1 .*has failed: ArithmeticError: no loss today"):
        await trainer.update(BATCH)
    await trainer.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.pids)
