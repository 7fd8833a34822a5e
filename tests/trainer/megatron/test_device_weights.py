"""Ranks hand the memory of a device over, bit for bit, and give all of it back, whatever happens."""

from __future__ import annotations

import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.errors import DivergedError, EngineError, TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.device import device_checksum
from tests.engine.devices import MappingSink, mapped, of_device
from tests.trainer.megatron.launching import megatron_trainer
from tests.trainer.megatron.test_publish import LAYOUTS, saved, shared_files
from tests.trainer.tiny import batch, settings

BUCKET_BYTES = 8_000


class DevicePlan(MegatronPlan):
    """Its ranks have a device whose memory other processes can map."""

    @contextmanager
    def worker(self, place):
        with (
            mock.patch("agentrl.trainer.megatron.gather.allocated", of_device),
            super().worker(place) as worker,
        ):
            yield worker


class FullPlan(MegatronPlan):
    """Its ranks have a device that is full."""

    @contextmanager
    def worker(self, place):
        full = mock.patch("agentrl.trainer.megatron.gather.allocated", return_value=None)
        with full, super().worker(place) as worker:
            yield worker


class DivergedPlan(DevicePlan):
    """An update of its ranks has left a number that is not finite."""

    @contextmanager
    def worker(self, place):
        with super().worker(place) as worker:
            for placed, parameter in worker._passes["old"].network.pieces():
                if placed.megatron == "decoder.layers.1.mlp.linear_fc1.weight":
                    parameter.data[-1, 1] = torch.inf
            yield worker


@contextmanager
def trainer_on_devices(model: Path, layout: str, plan=DevicePlan):
    ranks, sizes = LAYOUTS[layout]
    made = plan(
        layout=MegatronConfig(actor_num_gpus_per_node=ranks, **sizes),
        policy=Learning(PolicyLoss(), settings(lr=1e-2), 6),
        models={"old": str(model)},
    )
    trainer = megatron_trainer(made, model.parent / "ranks", bucket_bytes=BUCKET_BYTES)
    try:
        yield trainer
    finally:
        trainer.ranks.close()


def buffers_of(pid: int) -> set[str]:
    """The shared memory that a process has mapped, by inode."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return set(re.findall(r"(\d+) +/memfd:agentrl-bucket", maps))


def same(tensors, expected) -> bool:
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("TP2", "qwen3"),
        ("PP2", "glm4"),
        ("DP2", "qwen2"),
        ("PP2, virtual", "llama"),
        ("TP2 x PP2", "qwen3, tied"),
    ],
)
async def test_every_layout_packs_the_checkpoint_bit_for_bit(tmp_path, layout, kind):
    sink = MappingSink()
    with trainer_on_devices(saved(tmp_path, kind), layout) as trainer:
        report = await trainer.publish(sink, version=1)
        expected = dict(
            named_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
        )
        assert same(mapped(sink.snapshot), expected)
        assert report.num_bytes == sum(tensor.nbytes for tensor in expected.values())
        assert len(sink.snapshot.parts) > 10
        assert sink.snapshot.checksum == device_checksum(sink.snapshot.device.parts)
        assert sink.snapshot.not_finite is None
        assert not buffers_of(os.getpid()), "the driver has mapped nothing"
        # Whoever asks for them gets them in the host's memory, with the checksum of that.
        buckets = dict(pair for bucket in await sink.snapshot.buckets() for pair in unpack(bucket))
        host = await sink.snapshot.on_host()
        assert same(buckets, expected)
        assert host is await sink.snapshot.on_host()
        assert host.checksum == checksum(expected.items())


@pytest.mark.full
async def test_a_version_stays_until_the_next_and_then_its_memory_is_given_back(tmp_path):
    sink, before = MappingSink(), shared_files()
    with trainer_on_devices(saved(tmp_path, "qwen3"), "TP2") as trainer:
        first, second = trainer.ranks.pids
        idle = [buffers_of(pid) for pid in trainer.ranks.pids]
        checksums = []
        for version in (1, 2, 3):
            await trainer.update(batch())
            await trainer.publish(sink, version=version)
            checksums.append(sink.snapshot.checksum)
            assert len(buffers_of(first) - idle[0]) == 1
            assert buffers_of(second) == idle[1]
        assert len(set(checksums)) == 3

        def refuse(snapshot):
            assert len(buffers_of(first) - idle[0]) == 2, "the previous one is kept for a roll-back"
            raise EngineError("no room")

        serving, weights = sink.snapshot, mapped(sink.snapshot)
        sink.does = refuse
        await trainer.update(batch())
        with pytest.raises(EngineError, match="no room"):
            await trainer.publish(sink, version=4)
        assert len(buffers_of(first) - idle[0]) == 1
        assert sink.snapshot is serving
        assert same(mapped(serving), weights), "training goes on, and changes nothing of it"
        # A trainer that has given its memory away keeps nothing on the device, and has the version still.
        await trainer.offload()
        await trainer.publish(sink := MappingSink(), version=5)
        serving.free()
        await trainer.publish(sink, version=6)
        assert buffers_of(first) == idle[0]
        assert sink.snapshot.device is None
        buckets = dict(pair for bucket in await sink.snapshot.buckets() for pair in unpack(bucket))
        assert (await sink.snapshot.on_host()).checksum == checksum(buckets.items())
        assert not same(buckets, weights)
    assert shared_files() <= before


@pytest.mark.full
async def test_where_a_device_is_full_weights_go_through_the_host(tmp_path):
    sink = MappingSink()
    with trainer_on_devices(saved(tmp_path, "qwen2"), "TP2", FullPlan) as trainer:
        await trainer.publish(sink, version=1)
        assert sink.snapshot.device is None
        assert await sink.snapshot.on_host() is sink.snapshot
        expected = dict(
            named_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
        )
        buckets = await sink.snapshot.buckets()
        assert same(dict(pair for bucket in buckets for pair in unpack(bucket)), expected)


@pytest.mark.full
async def test_weights_that_are_not_finite_are_sent_to_nobody(tmp_path):
    sink = MappingSink()
    with trainer_on_devices(saved(tmp_path, "qwen2"), "DP2", DivergedPlan) as trainer:
        idle = buffers_of(trainer.ranks.pids[0])
        with pytest.raises(DivergedError, match=r"layers\.1\.mlp\.up_proj"):
            await trainer.publish(sink, version=1)
        assert sink.snapshot is None
        assert buffers_of(trainer.ranks.pids[0]) == idle


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_killed_leaves_nothing(tmp_path, rank):
    sink, before = MappingSink(), shared_files()
    with trainer_on_devices(saved(tmp_path, "qwen3"), "TP2") as trainer:
        await trainer.publish(sink, version=1)
        pids = trainer.ranks.pids
        os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(TrainerError, match=rf"rank {rank} .*was ended by SIGKILL"):
            await trainer.publish(sink, version=2)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert not Path(sink.snapshot.device.handle.path).exists()
        with pytest.raises(TrainerError):
            await sink.snapshot.buckets()
    assert shared_files() <= before
