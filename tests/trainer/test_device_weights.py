"""The torch trainer publishes from the memory of its device, and gives that back."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from agentrl.errors import DivergedError, EngineError
from agentrl.trainer.launch import device_weights
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, unpack
from tests.engine.devices import MappingSink, mapped, of_device
from tests.trainer.tiny import POLICY_LOSS, qwen3, trainer


@pytest.fixture
def kept():
    """What is kept on the device."""
    with mock.patch("agentrl.trainer.torch.worker.allocated", of_device):
        yield device_weights._kept
    device_weights._kept.clear()


def weights_of(model):
    return {name: tensor.detach().clone() for name, tensor in named_weights(model)}


def same(tensors, expected) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[n], expected[n]) for n in expected)


async def unpacked(snapshot):
    return dict(pair for bucket in await snapshot.buckets() for pair in unpack(bucket))


async def test_what_a_server_maps_is_the_model_and_one_version_is_kept(kept):
    sink, ours = MappingSink(), trainer(model := qwen3(torch.float32), POLICY_LOSS)
    for version in (1, 2):
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        await ours.publish(sink, version=version)
        assert same(mapped(sink.snapshot), weights_of(model))
        assert len(kept) == 1
    serving, before = sink.snapshot, weights_of(model)

    def refuse(snapshot):
        raise EngineError("no room")

    sink.does = refuse
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    with pytest.raises(EngineError, match="no room"):
        await ours.publish(sink, version=3)
    assert list(kept) == [serving.number]
    assert same(mapped(serving), before)
    assert same(await unpacked(serving), before)
    assert (await serving.on_host()).checksum == checksum(before.items())
    with torch.no_grad():
        model.model.norm.weight[2] = torch.nan
    with pytest.raises(DivergedError, match=r"model\.norm\.weight"):
        await ours.publish(sink, version=4)
    assert list(kept) == [serving.number]


async def test_a_trainer_that_gave_its_memory_away_keeps_no_version_on_the_device(kept):
    sink, ours = MappingSink(), trainer(model := qwen3(torch.float32), POLICY_LOSS)
    await ours.offload()
    with mock.patch.object(device_weights, "PINNED_BYTES", 1000):
        await ours.publish(sink, version=1)
        (held,) = kept.values()
        assert sink.snapshot.device is None
        assert len(held.packed.memory.bytes_B) == 0
        assert len(held.pieces) > 3
        before = weights_of(model)
        with torch.no_grad():
            model.model.norm.weight.add_(1)
        assert same(await unpacked(sink.snapshot), before)
    await ours.onload()
    await ours.publish(sink, version=2)
    assert list(kept) == [sink.snapshot.number]
    assert same(mapped(sink.snapshot), weights_of(model))


async def test_a_sink_that_takes_no_such_memory_gets_buckets(kept):
    sink, ours = MappingSink(), trainer(model := qwen3(torch.float32), POLICY_LOSS)
    sink.takes_device_memory = False
    await ours.publish(sink, version=1)
    assert not kept
    assert same(await unpacked(sink.snapshot), weights_of(model))


async def test_a_version_outlives_the_trainer_of_its_plan(kept):
    sink, first = MappingSink(), trainer(qwen3(torch.float32), POLICY_LOSS)
    await first.publish(sink, version=1)
    second = trainer(model := qwen3(torch.float32), POLICY_LOSS)
    second.ranks = second.publisher._snapshots._ranks = first.ranks
    first.ranks._worker = second._worker
    await second.publish(sink, version=2)
    assert list(kept) == [sink.snapshot.number]
    assert same(mapped(sink.snapshot), weights_of(model))
