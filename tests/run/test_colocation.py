"""Engine and trainer take turns: the order of their calls, and weights wherever the engine needs some."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.run.colocation import Colocation
from agentrl.runtime.activity import TRAIN, Activities, requesting, working
from agentrl.runtime.clocks import SharedDeadline
from agentrl.trainer.config import TrainerConfig


class Calls:
    """An engine, its sink and a trainer, which record what is called."""

    version = 3

    def __init__(self):
        self.calls = []

    async def release_memory(self, tags):
        self.calls.append(f"release {' '.join(tags)}")
        return 7

    async def resume_memory(self, tags):
        self.calls.append(f"resume {' '.join(tags)}")

    async def onload(self):
        self.calls.append("onload")

    async def offload(self):
        self.calls.append("offload")
        return 9

    async def publish(self, sink, *, version):
        self.calls.append(f"publish {version}")


async def iterate(colocation, calls, *, sends):
    async with colocation.training():
        calls.calls.append("train")
    async with colocation.publishing(sends=sends):
        if sends:
            await calls.publish(None, version=4)


@pytest.mark.parametrize(
    ("settings", "sends", "expected"),
    [
        ({}, True, "train, publish 4"),
        ({}, False, "train"),
        (
            {"colocate": True},
            True,
            "release weights kv_cache, onload, train, offload, resume weights, publish 4, resume kv_cache",
        ),
        (
            # Without an update the engine gets the weights that it had: they are the trainer's, still.
            {"colocate": True},
            False,
            "release weights kv_cache, onload, train, offload, resume weights, publish 3, resume kv_cache",
        ),
        ({"colocate": True, "offload_rollout": False}, False, "onload, train, offload"),
        (
            {"offload_rollout": True},
            True,
            "release weights kv_cache, train, resume weights, publish 4, resume kv_cache",
        ),
    ],
)
async def test_the_order_of_an_iteration(settings, sends, expected):
    calls = Calls()
    colocation = Colocation.of(TrainerConfig(**settings), calls, calls)
    colocation.trainer = calls
    await iterate(colocation, calls, sends=sends)
    assert ", ".join(calls.calls) == expected
    metrics = colocation.take_metrics()
    assert metrics.get("perf/offload_rollout_bytes") == (7 if "release" in expected else None)
    assert metrics.get("perf/offload_train_bytes") == (9 if "offload" in expected.split(", ") else None)
    assert ("perf/offload_time" in metrics) is bool(settings)
    assert colocation.take_metrics() == {}


@pytest.mark.parametrize("version", [0, 4])
async def test_a_trainer_starts_while_the_engine_has_released_its_memory(version):
    calls = Calls()
    colocation = Colocation.of(TrainerConfig(colocate=True), calls, calls)
    async with colocation.starting(version):
        calls.calls.append("start")
        colocation.trainer = calls
    assert calls.calls == [
        *("release weights kv_cache", "start", "offload", "resume weights"),
        *(f"publish {version or calls.version}", "resume kv_cache"),
    ]


async def test_requests_that_are_held_do_not_count_as_work_of_the_engine():
    """The engine works in its own turn only, though a request is there all the time."""
    activities, calls = Activities(), Calls()
    colocation = Colocation.of(TrainerConfig(colocate=True), calls, calls)
    colocation.trainer = calls
    with activities.observed(), requesting():
        began = activities.busy
        async with colocation.training():
            with working(TRAIN):
                await asyncio.sleep(0.05)
        held = activities.busy
        async with colocation.publishing(sends=True):
            pass
        await asyncio.sleep(0.05)
        played = activities.busy
    assert held.since(began).trainer_s >= 0.05
    assert held.since(began).both_s == 0.0
    assert held.since(began).engine_s < 0.02
    assert played.since(held).engine_s >= 0.04
    assert activities.num_requests == 0


async def test_a_deadline_that_waits_for_the_engine_stands_still_in_the_trainers_turn():
    calls = Calls()
    colocation = Colocation.of(TrainerConfig(colocate=True), calls, calls)
    deadline = SharedDeadline(0.1)
    with colocation.absence.entered(deadline):
        async with colocation.training():
            await asyncio.sleep(0.3)
        async with colocation.publishing(sends=True):
            await asyncio.sleep(0.1)
        assert not deadline.is_over
        await asyncio.sleep(0.15)
        assert deadline.is_over


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"colocate": True, "offload_rollout": False}, "save"),
        (
            {"colocate": True},
            "release weights kv_cache, onload, save, offload, resume weights, publish 3, resume kv_cache",
        ),
    ],
)
async def test_a_checkpoint_is_copied_in_a_turn_of_the_trainer(settings, expected):
    calls = Calls()
    colocation = Colocation.of(TrainerConfig(**settings), calls, calls)
    colocation.trainer = calls
    async with colocation.saving():
        calls.calls.append("save")
    assert ", ".join(calls.calls) == expected


async def test_a_failure_in_the_trainers_turn_resumes_nothing():
    calls = Calls()
    colocation = Colocation.of(TrainerConfig(colocate=True), calls, calls)
    with pytest.raises(RuntimeError, match="half-way"):
        async with colocation.training():
            raise RuntimeError("half-way")
    assert calls.calls == ["release weights kv_cache"]
