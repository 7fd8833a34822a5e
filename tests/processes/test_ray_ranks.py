"""The trainer's ranks on a real Ray do what they do as child processes, and fail as those do."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import torch

from agentrl.errors import ConfigError, RemoteError, TrainerError
from agentrl.processes.ray.actors import ActorObject
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.plan import Worker
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import WORKER
from agentrl.weights.hf.export import save_model
from tests.processes.ranks import ranks_on
from tests.trainer.test_processes import RecordingSink, Waits, learned, plan_over, takes_two_versions
from tests.trainer.tiny import batch, qwen3, tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(qwen3(torch.float32), tokenizer(), str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def ranks(session, placement, tmp_path_factory):
    """One rank for all tests that leave it alive."""
    ranks = ranks_on(session, placement, 1, tmp_path_factory.mktemp("ranks"), preloaded=WORKER)
    yield ranks
    ranks.close()
    await_end(ranks)


def await_end(ranks):
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in ranks.pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_rank_on_ray_learns_bit_for_bit_what_is_learned_inline(model, ranks):
    plan = plan_over(model, critic=True, ref=model)
    inline = await learned(await RankTrainer.started(InlineRank(), plan))
    trainer = await RankTrainer.started(ranks, plan)
    assert ranks.pids != [os.getpid()]
    assert await learned(trainer) == inline


async def test_buckets_arrive_in_order(model, ranks):
    trainer = await RankTrainer.started(ranks, plan_over(model))
    trainer.publisher._bucket_bytes = 2048
    inline = await RankTrainer.started(InlineRank(), plan_over(model))
    sinks = RecordingSink(), RecordingSink()
    for one, sink in zip((trainer, inline), sinks, strict=True):
        await one.publish(sink, version=1)
    assert [*sinks[0].tensors.items()] == [*sinks[1].tensors.items()]
    assert sinks[0].checksum == sinks[1].checksum


async def test_the_versions_that_a_rank_on_ray_keeps_are_those_of_a_dry_run(model, ranks):
    await takes_two_versions(model, ranks)


async def test_a_stream_that_is_left_is_finished_before_the_next_call(model, ranks):
    trainer = await RankTrainer.started(ranks, plan_over(model))
    buckets = ranks.stream(Worker.weights, trainer.publisher.manifest, 2048)
    next(buckets)
    buckets.close()
    assert ranks.call(Worker.manifest) == [trainer.publisher.manifest]


async def test_the_stacks_of_a_rank_are_printed_in_the_middle_of_a_call(model, ranks, tmp_path):
    """A call that waits in the rank keeps no control call waiting."""
    released = tmp_path / "released"
    plan = plan_over(model, loss=WaitsFor(tmp_path / "begun", released))
    trainer = await RankTrainer.started(ranks, plan)
    updating = asyncio.create_task(trainer.update(batch()))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    ranks.print_stacks()
    while "in __call__" not in ranks._ranks[0].log.read_text():
        await asyncio.sleep(0.01)
    released.touch()
    assert (await updating).num_tokens > 0


async def test_a_function_that_no_rank_can_import_is_refused(model, ranks):
    def local(outputs, inputs):
        raise NotImplementedError

    with pytest.raises(ConfigError, match="where no other process can import it"):
        await RankTrainer.started(ranks, plan_over(model, loss=local))


class WaitsFor(Waits):
    """A loss that has begun when one file is there, and ends when another is."""

    def __init__(self, begun, released):
        super().__init__(begun, 0)
        self.released = str(released)

    def __call__(self, outputs, inputs):
        with open(self.begun, "w"):
            while not os.path.exists(self.released):
                time.sleep(0.01)
        return self.inner(outputs, inputs)


def breaks(outputs, inputs):
    print("the last words", end="")
    raise ArithmeticError("no loss today")


async def test_a_rank_that_fails_says_why_and_its_log_is_kept(ranks, model):
    """The last test of the rank that the others share: it ends."""
    trainer = await RankTrainer.started(ranks, plan_over(model, loss=breaks))
    failed = rf"rank 0 .*process {ranks.pids[0]} on 127.0.0.1\) has failed: ArithmeticError: no loss today"
    with pytest.raises(TrainerError, match=failed) as caught:
        await trainer.update(batch())
    log = ranks._ranks[0].log
    assert str(log) in str(caught.value)
    assert "the last words" in log.read_text()
    with pytest.raises(TrainerError, match=failed):
        await trainer.score(batch().samples)
    await_end(ranks)


class Nothing:
    """A class of a module that no process has."""


Nothing.__module__ = "nowhere"


@pytest.mark.full
def test_a_process_that_does_not_come_up_says_why(session, placement, tmp_path):
    log = tmp_path / "x.log"
    broken = ActorObject(session, placement.group, placement.ranks[0], log, environment={"": "no name"})
    with pytest.raises(RemoteError, match=r"did not start: .*Invalid argument") as caught:
        broken.identify()
    assert caught.value.is_gone
    absent = ActorObject(session, placement.group, placement.ranks[0], log)
    with pytest.raises(RemoteError, match="ModuleNotFoundError: No module named 'nowhere'"):
        absent.create(Nothing).result()
    assert "No module named 'nowhere'" in absent.last_lines()[-1]
    absent.close()


@pytest.mark.faults
async def test_a_rank_that_is_killed_in_mid_call_is_named(session, placement, model, tmp_path):
    ranks = ranks_on(session, placement, 1, tmp_path, preloaded=WORKER)
    never = tmp_path / "never"
    trainer = await RankTrainer.started(ranks, plan_over(model, loss=WaitsFor(tmp_path / "begun", never)))
    updating = asyncio.create_task(trainer.update(batch()))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(TrainerError, match=rf"rank 0 .*process {ranks.pids[0]} on .*was killed, or crashed"):
        await updating
    ranks.close()


@pytest.mark.faults
async def test_a_rank_that_is_killed_in_mid_stream_is_named(session, placement, model, tmp_path):
    ranks = ranks_on(session, placement, 1, tmp_path, preloaded=WORKER)
    trainer = await RankTrainer.started(ranks, plan_over(model))
    buckets = ranks.stream(Worker.weights, trainer.publisher.manifest, 2048)
    received = [next(buckets), next(buckets)]
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(TrainerError, match=rf"rank 0 .*process {ranks.pids[0]} on .*was killed, or crashed"):
        received += buckets
    # Some were still to come.
    assert sum(len(bucket.tensors) for bucket in received) < len(trainer.publisher.manifest)
    ranks.close()


@pytest.mark.faults
async def test_a_call_that_is_cancelled_twice_ends_the_ranks(session, placement, model, tmp_path):
    ranks = ranks_on(session, placement, 1, tmp_path, preloaded=WORKER)
    never = tmp_path / "never"
    trainer = await RankTrainer.started(ranks, plan_over(model, loss=WaitsFor(tmp_path / "begun", never)))
    updating = asyncio.create_task(trainer.update(batch()))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    updating.cancel()
    await asyncio.sleep(0.1)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    await asyncio.to_thread(await_end, ranks)
    ranks.close()
