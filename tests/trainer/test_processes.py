"""A torch trainer in a process of its own does what it does inline, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from agentrl.assembly.memory import published_memory
from agentrl.errors import ConfigError, TrainerError
from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.runtime.activity import PROCESS, Activities
from agentrl.trainer.launch import processes as launched
from agentrl.trainer.launch import rank_snapshot
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.launch.messages import pickled_plan
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning, Worker
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import open_source
from agentrl.weights.shared import BUCKET_NAME
from tests.trainer.test_roles import with_returns
from tests.trainer.tiny import batch, qwen3, settings, tokenizer


class Waits:
    """A loss that takes its time, and leaves a file to say that it has begun."""

    def __init__(self, begun, seconds):
        self.begun, self.seconds, self.inner = str(begun), seconds, PolicyLoss()

    def __call__(self, outputs, inputs):
        with open(self.begun, "w"):
            time.sleep(self.seconds)
        return self.inner(outputs, inputs)


class RecordingSink:
    """A sink that keeps what it is sent, by name."""

    def begin(self, manifest, version):
        self.tensors = {}
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def put(self, bucket):
        from agentrl.weights.codec import unpack

        self.tensors |= {name: tensor.numpy().tobytes() for name, tensor in unpack(bucket)}

    async def commit(self, checksum):
        self.checksum = checksum


class KeepingSink(RecordingSink):
    """A sink that has one snapshot, as a fleet has. most: bytes of weights in shared memory so far."""

    takes_device_memory = False

    def __init__(self, pid):
        self.pid, self.current, self.most = pid, None, 0

    def holds(self, snapshot):
        return snapshot is self.current

    async def load(self, snapshot, version):
        self.most = max(self.most, shared_bytes(self.pid))
        previous, self.current = self.current, snapshot
        if previous is not None:
            previous.free()


def shared_bytes(pid):
    """What the shared buffers of a rank or this process take: pages that were never written take nothing."""
    found = {}
    for process in (pid, "self"):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            # The one that lists the folder is closed.
            if BUCKET_NAME in str(descriptor.resolve()):
                status = descriptor.stat()
                found[status.st_ino] = 512 * status.st_blocks
    return sum(found.values())


async def takes_two_versions(model, ranks):
    """Rank 0 keeps one version for servers, and another one while it is sent, as a dry run counts them."""
    trainer = await RankTrainer.started(ranks, plan_over(model))
    trainer.publisher._bucket_bytes = 1 << 14
    sink = KeepingSink(ranks.pids[0])
    for version in range(1, 5):
        await trainer.publish(sink, version=version)
        await trainer.update(batch())
    counted = published_memory(open_source(model).config, bf16=False).times(2).total
    num_buckets = len(sink.current.parts)
    assert num_buckets > 1
    assert counted <= sink.most <= counted + 2 * num_buckets * mmap.PAGESIZE
    sink.current.free()


async def test_the_versions_that_a_rank_keeps_for_servers_are_those_of_a_dry_run(model, processes):
    await takes_two_versions(model, processes)


async def test_memory_that_is_in_use_here_is_not_filled_again(model, processes):
    trainer = await RankTrainer.started(processes, plan_over(model))

    async def taken():
        take = partial(processes.snapshot, Worker.weights, trainer.publisher.manifest, 1 << 14)
        return await processes.run(take)

    first = await taken()
    buckets = await first.buckets()
    assert len(buckets) > 1
    before = [bucket.data.tobytes() for bucket in buckets]
    assert await first.run(bytes_of) == before
    first.free()
    await trainer.update(batch())
    second = await taken()
    assert await second.run(bytes_of) != before
    assert [bucket.data.tobytes() for bucket in buckets] == before
    second.free()


@pytest.mark.parametrize("kept", [False, True], ids=["stream", "snapshot"])
async def test_a_rank_that_dies_before_its_memory_is_opened_is_named(model, tmp_path, monkeypatch, kept):
    """What it has sent arrives after its death, and the memory of which it tells went with it."""
    module = rank_snapshot if kept else launched
    opened, ranks = module.received, Processes(1, tmp_path, preloaded=WORKER)
    [victim] = ranks.pids

    def dies_first(tensors, data):
        os.kill(victim, signal.SIGKILL)
        # Until it was waited for, a process that has ended has a folder of its descriptors, which is empty.
        while os.path.exists(data.path):
            time.sleep(0.01)
        return opened(tensors, data)

    trainer = await RankTrainer.started(ranks, plan_over(model))
    trainer.publisher._bucket_bytes = 1 << 14
    monkeypatch.setattr(module, "received", dies_first)

    async def receives():
        if not kept:
            await trainer.publish(RecordingSink(), version=1)
        take = partial(ranks.snapshot, Worker.weights, trainer.publisher.manifest, 1 << 14)
        await (await ranks.run(take)).buckets()

    with pytest.raises(TrainerError, match=rf"rank 0 .*process {victim}\) was ended by SIGKILL"):
        await receives()
    ranks.close()


def bytes_of(buckets):
    return [bucket.data.tobytes() for bucket in buckets]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(qwen3(torch.float32), tokenizer(), str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """One rank for all tests that leave it alive: starting one takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = Processes(1, folder, preloaded=WORKER)
    yield ranks
    ranks.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.pids)


def plan_over(model, loss=None, **roles):
    critic = Learning(ValueLoss(), settings(lr=3e-2), 6) if roles.pop("critic", False) else None
    policy = Learning(loss or PolicyLoss(), settings(lr=1e-2), 6)
    return TorchPlan(policy=policy, models={"old": model, **roles}, critic=critic, critic_warmup=1)


async def learned(trainer):
    """Reports, scores and weights of three steps."""
    train_batch = with_returns(batch())
    reports = [(await trainer.update(train_batch)).metrics for _ in range(3)]
    scores = await trainer.score(train_batch.samples, ("old", "ref", "values"))
    sink = RecordingSink()
    published = await trainer.publish(sink, version=3)
    assert published.num_bytes == sum(map(len, sink.tensors.values()))
    listed = [[array.tolist() for array in arrays] for arrays in (scores.proximal, scores.ref, scores.values)]
    return reports, listed, sink.tensors, sink.checksum


@pytest.mark.full
async def test_a_rank_prints_its_stacks_on_a_signal_and_goes_on(model, processes):
    trainer = await RankTrainer.started(processes, plan_over(model))
    log = Path(processes._ranks[0].log)
    os.kill(processes.pids[0], signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while "in serve" not in log.read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert (await trainer.update(batch())).num_tokens > 0


async def test_the_calls_of_a_rank_are_in_the_timeline_of_their_run_and_in_its_status(
    model, processes, tmp_path
):
    activities, begun = Activities(), tmp_path / "begun"
    with activities.observed():
        trainer = await RankTrainer.started(processes, plan_over(model, Waits(begun, 0.3)))
        before_s = time.perf_counter()
        updating = asyncio.create_task(trainer.update(batch()))
        while not begun.exists():
            await asyncio.sleep(0.01)
        doing = activities.processes["rank 0"]
        await updating
        after_s = time.perf_counter()
        await trainer.publish(RecordingSink(), version=1)
    assert doing.name == "update"
    assert before_s < doing.since_s < after_s
    waiting = activities.processes["rank 0"]
    assert (waiting.name, waiting.what) == ("", "a call")
    spans = {span.name: span for span in activities.spans if span.place == PROCESS}
    assert {"build", "update", "gather"} <= spans.keys()
    update = spans["update"]
    assert (update.process, update.lane) == ("rank 0", 1)
    assert before_s < update.start_s < update.end_s - 0.3 < after_s - 0.3
    # Elsewhere nothing is recorded, and the run has no more of it.
    await trainer.update(batch())
    assert len([span for span in activities.spans if span.name == "update"]) == 1


async def test_a_rank_learns_bit_for_bit_what_is_learned_inline(model, processes, tmp_path):
    plan = plan_over(model, critic=True, ref=model)
    inline = await learned(await RankTrainer.started(InlineRank(), plan))
    trainer = await RankTrainer.started(processes, plan)
    assert await learned(trainer) == inline
    await trainer.save(str(tmp_path / "saved"))
    loaded = open_directory(tmp_path / "saved", torch.float32)
    saved = {name: t.numpy().tobytes() for name, t in loaded.state_dict().items()}
    assert {name: saved[name] for name in inline[2]} == inline[2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_a_saved_state_goes_on_bit_for_bit(model, tmp_path, optimizer):
    learning = Learning(PolicyLoss(), settings(lr=1e-2, optimizer=optimizer), 6)
    plan = TorchPlan(policy=learning, models={"old": model}, critic=Learning(ValueLoss(), settings(), 6))
    train_batch = with_returns(batch())

    async def steps(trainer, number):
        return [(await trainer.update(train_batch)).metrics for _ in range(number)]

    trainer = await RankTrainer.started(InlineRank(), plan)
    await steps(trainer, 2)
    writing = await trainer.save_state(str(tmp_path / "state"))
    # It trains on while its state is written.
    expected = await steps(trainer, 2)
    await writing
    another = await RankTrainer.started(InlineRank(), plan)
    # It has a past of its own, which it forgets.
    await steps(another, 1)
    await another.load_state(str(tmp_path / "state"))
    assert await steps(another, 2) == expected
    other = Learning(PolicyLoss(), settings(optimizer={"adamw": "muon", "muon": "adamw"}[optimizer]), 6)
    stranger = await RankTrainer.started(InlineRank(), TorchPlan(policy=other, models={"old": model}))
    with pytest.raises(ConfigError, match=r"was saved with (muon|networks)"):
        await stranger.load_state(str(tmp_path / "state"))


class SlowSink(RecordingSink):
    """A sink that takes longer for a bucket than a trainer waits between two questions to its ranks."""

    async def put(self, bucket):
        await asyncio.sleep(0.15)
        await super().put(bucket)


@pytest.mark.parametrize("fails", [False, True])
async def test_weights_are_sent_while_a_state_is_written(model, processes, tmp_path, fails):
    plan = plan_over(model, PolicyLoss())
    trainer = await processes.run(lambda: RankTrainer(processes, plan, bucket_bytes=4096))
    whole = RecordingSink()
    await trainer.publish(whole, version=1)
    writing = await trainer.save_state(str(tmp_path / "state"))
    sink = SlowSink()
    async with asyncio.timeout(60):
        if fails:
            sink.commit = None
            with pytest.raises(TypeError):
                await trainer.publish(sink, version=2)
        else:
            await trainer.publish(sink, version=2)
        await writing
        assert sink.tensors == whole.tensors
        assert (await trainer.update(batch())).metrics["train/loss"] != 0


async def test_the_loop_goes_on_while_a_rank_updates(model, processes, tmp_path):
    trainer = await RankTrainer.started(processes, plan_over(model, Waits(tmp_path / "begun", 0.3)))
    ticks, updating = 0, asyncio.create_task(trainer.update(batch()))
    while not updating.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert updating.result().metrics["train/loss"] != 0
    assert ticks >= 10


async def test_a_cancelled_update_ends_whole_and_says_what_it_did(model, processes, tmp_path):
    trainer = await RankTrainer.started(processes, plan_over(model, Waits(tmp_path / "begun", 0.3)))
    reports = []

    async def step():
        reports.append(await trainer.update(batch()))
        await asyncio.sleep(0)
        raise AssertionError("the cancellation was lost")

    task = asyncio.create_task(step())
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(reports) == 1
    assert (await trainer.update(batch())).metrics["train/lr"] == pytest.approx(1e-2)


@pytest.mark.full
async def test_cancelled_twice_it_waits_no_longer_and_no_rank_is_left(model, tmp_path):
    processes = Processes(1, tmp_path / "ranks", preloaded=WORKER)
    trainer = await RankTrainer.started(processes, plan_over(model, Waits(tmp_path / "begun", 300.0)))
    task, began = asyncio.create_task(trainer.update(batch())), time.monotonic()
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TrainerError, match="was ended by SIGKILL"):
        await trainer.score(batch().samples)
    await trainer.close()
    assert time.monotonic() - began < 60
    assert not os.path.exists(f"/proc/{processes.pids[0]}")


async def test_a_rank_that_dies_is_named(model, tmp_path):
    processes = Processes(1, tmp_path / "ranks", preloaded=WORKER)
    trainer = await RankTrainer.started(processes, plan_over(model))
    os.kill(processes.pids[0], signal.SIGKILL)
    with pytest.raises(TrainerError, match=rf"rank 0 .*process {processes.pids[0]}\) was ended by SIGKILL"):
        await trainer.update(batch())
    await trainer.close()


def test_what_a_notebook_defines_reaches_no_other_process(model):
    def local(outputs, inputs):
        return None

    in_a_notebook = type("Mine", (), {"__module__": "__main__"})
    for loss in (local, lambda outputs, inputs: None, in_a_notebook()):
        with pytest.raises(ConfigError, match="put it into a module, and name it by its import path"):
            pickled_plan(plan_over(model, loss))
    plan = plan_over(model, Waits("begun", 0.0))
    assert pickle.loads(pickled_plan(plan)).models == plan.models


def test_a_value_that_pickle_does_not_take_is_refused_with_a_sentence():
    with pytest.raises(ConfigError, match=r"sent to another process \(TypeError: .*lock.*\); pass what"):
        pickled_plan({"lock": threading.Lock()})
