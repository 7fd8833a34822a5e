"""Weights are published as the engine's model is stored; the trainer's own stay as they are."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.sglang.transports.disk import Folders
from agentrl.errors import DivergedError, EngineError
from agentrl.trainer.launch import device_weights
from agentrl.types.seams import AdapterSink
from agentrl.weights import delta
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, unpack
from agentrl.weights.hf.casting import cast_directory
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.streaming import deliver_directory
from tests.engine.devices import MappingSink, mapped, of_device
from tests.trainer.tiny import POLICY_LOSS, tokenizer, trainer
from tests.weights.hf.quantizing import model_of, rounded_by

KINDS = ["qwen3", "qwen3_moe"]
CASTS = ["fp8", "fp8-tensor", "int4"]


class HostSink(MappingSink):
    """Takes snapshots of the host's memory alone."""

    takes_device_memory = False

    async def tensors(self):
        return dict(pair for bucket in await self.snapshot.buckets() for pair in unpack(bucket))


class AdapterHost(HostSink, AdapterSink):
    takes_adapters = True


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A quantized directory, by its kind and its cast."""
    made = {}

    def of(kind="qwen3", cast="fp8"):
        if (kind, cast) not in made:
            folder = tmp_path_factory.mktemp("models")
            model_of(kind).save_pretrained(folder / "plain")
            tokenizer().save_pretrained(folder / "plain")
            cast_directory(folder / "plain", folder / "cast", cast)
            made[kind, cast] = folder / "cast"
        return made[kind, cast]

    return of


def trained(folder, **settings):
    """A trainer whose weights have left those of the folder."""
    ours = trainer(model := open_directory(folder, torch.float32), POLICY_LOSS, **settings)
    move(model)
    return ours, model


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))


def stored_in(folder):
    return load_file(folder / "model.safetensors")


def expected_of(model, folder, cast):
    """The trainer's weights, rounded by an oracle where the folder has fewer bits."""
    names = {name.removesuffix("_packed") for name, t in stored_in(folder).items() if is_number(name, t)}
    return {
        name: rounded_by(tensor.numpy(), cast, torch.float32) if name in names else tensor.clone()
        for name, tensor in named_weights(model)
    }


def is_number(name, tensor):
    return name.endswith("_packed") or tensor.itemsize == 1


def values_of(tensors, cast):
    """What published tensors stand for, by a reader of its own."""
    values = {}
    for name, tensor in tensors.items():
        if is_number(name, tensor):
            weight = name.removesuffix("_packed")
            scales = tensors[f"{weight}_scale_inv" if cast == "fp8" else f"{weight}_scale"]
            shifts = torch.arange(0, 32, 4)
            is_packed = cast == "int4"
            numbers = ((tensor.long()[..., None] >> shifts) % 16 - 8).flatten(1) if is_packed else tensor
            height, width = {"fp8": (128, 128), "fp8-tensor": numbers.shape, "int4": (1, 32)}[cast]
            scales = scales.reshape(1, 1) if cast == "fp8-tensor" else scales
            spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
            values[weight] = numbers.float() * spread[: numbers.shape[0], : numbers.shape[1]]
        elif "_scale" not in name and "_shape" not in name:
            values[name] = tensor
    return values


def same(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
async def test_servers_get_the_files_names_with_numbers_and_scales(directory, kind, cast):
    folder = directory(kind, cast)
    ours, model = trained(folder)
    sink, before = HostSink(), {name: p.detach().clone() for name, p in model.named_parameters()}
    report = await ours.publish(sink, version=1)
    tensors = await sink.tensors()
    stored = stored_in(folder)
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in stored.items()
    }
    same(values_of(tensors, cast), expected_of(model, folder, cast))
    assert sink.snapshot.checksum == checksum(tensors.items())
    assert report.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    same(dict(model.named_parameters()), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", CASTS)
async def test_the_embedded_engine_gets_what_the_numbers_stand_for(directory, kind, cast):
    folder = directory(kind, cast)
    ours, model = trained(folder)
    engine = EmbeddedEngine.from_pretrained(folder, max_slots=2, max_context_len=32)
    sent = []
    with mock.patch.object(type(engine.sink), "begin", recording(engine.sink.begin, sent)):
        await ours.publish(engine.sink, version=1)
    assert engine.version == 1
    same(dict(sent), expected_of(model, folder, cast))
    await engine.close()


def recording(begin, sent):
    """Have `begin` keep what is put; the engine compares the checksum of what it has loaded itself."""

    @asynccontextmanager
    async def recorded(_, manifest, version):
        async with begin(manifest, version) as transaction:
            put = transaction.put

            async def keep(bucket):
                sent.extend(unpack(bucket))
                await put(bucket)

            transaction.put = keep
            yield transaction

    return recorded


async def test_weights_are_cast_on_the_device_that_has_them(directory):
    folder, sink = directory(), MappingSink()
    ours, model = trained(folder)
    patches = [f"agentrl.trainer.{place}.allocated" for place in ("torch.worker", "launch.cast_weights")]
    with mock.patch(patches[0], of_device), mock.patch(patches[1], of_device):
        for version in (1, 2):
            await ours.publish(sink, version=version)
            same(values_of(mapped(sink.snapshot), "fp8"), expected_of(model, folder, "fp8"))
            assert len(device_weights._kept) == 1
            move(model)
        host = dict(pair for bucket in await sink.snapshot.buckets() for pair in unpack(bucket))
        assert host.keys() == stored_in(folder).keys()
        # Where there is no room for both, they go through the host.
        with mock.patch(patches[1], return_value=None):
            await ours.publish(sink, version=3)
        assert sink.snapshot.device is None
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[2, 3] = torch.inf
        with pytest.raises(DivergedError, match="up_proj"):
            await ours.publish(sink, version=4)
    device_weights._kept.clear()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("cast", CASTS)
async def test_weights_that_are_not_finite_are_not_published(directory, cast, number):
    ours, model = trained(directory("qwen3", cast))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5, 6] = number
    with pytest.raises(DivergedError, match=r"layers\.1\.mlp\.down_proj"):
        await ours.publish(HostSink(), version=1)


async def test_what_is_saved_is_not_quantized(directory, tmp_path):
    ours, model = trained(directory())
    await ours.save(str(tmp_path / "saved"))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    same(dict(named_weights(open_directory(tmp_path / "saved", torch.float32))), dict(named_weights(model)))


async def test_adapters_go_as_they_are_and_merged_ones_are_cast(directory):
    folder = directory()
    ours = trainer(open_directory(folder, torch.float32), POLICY_LOSS, lora_rank=2, lora_alpha=4)
    adapters, whole = AdapterHost(), HostSink()
    await ours.publish(adapters, version=1)
    assert all(".lora_" in name for name in await adapters.tensors())
    await ours.publish(whole, version=1)
    assert (await whole.tensors()).keys() == stored_in(folder).keys()


async def test_servers_that_run_already_get_the_same_tensors_first(directory):
    class Refusing:
        def begin(self, manifest, version):
            raise EngineError(str(sorted(manifest)))

    ours, _ = trained(directory())
    sink = HostSink()
    await ours.publish(sink, version=1)
    with pytest.raises(EngineError) as refused:
        await deliver_directory(directory(), Refusing(), 0, dtype="float32")
    later = sorted(spec for part in sink.snapshot.parts for spec in part)
    assert str(refused.value) == str(later)


async def test_a_delta_and_a_folder_of_a_version_hold_it(directory, tmp_path):
    folder = directory()
    ours, model = trained(folder)
    first, second = HostSink(), HostSink()
    await ours.publish(first, version=1)
    before = list(await first.snapshot.buckets())
    move(model)
    await ours.publish(second, version=2)
    after = list(await second.snapshot.buckets())
    changes = delta.delta_between(before, after)
    delta.write(changes, tmp_path / "delta.safetensors")
    applied = delta.apply(delta.read(tmp_path / "delta.safetensors"), before)
    result = dict(pair for bucket in applied for pair in unpack(bucket))
    expected = expected_of(model, folder, "fp8")
    same(values_of(result, "fp8"), expected)
    # As `agentrl serve` loads it.
    path = Folders(tmp_path / "versions", folder).put(2, second.snapshot.checksum, after)
    same(dict(named_weights(open_directory(path, torch.float32))), expected)
