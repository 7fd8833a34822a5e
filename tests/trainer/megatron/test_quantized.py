"""Megatron's ranks train what quantized numbers stand for, and rank 0 casts what they publish."""

from __future__ import annotations

import json

import pytest
import torch

from agentrl.weights.codec import named_weights
from agentrl.weights.hf.casting import cast_directory
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.loading import open_directory
from tests.trainer.megatron import models
from tests.trainer.megatron.test_publish import FAMILIES, trainer_over
from tests.trainer.test_cast_weights import HostSink, expected_of, same, stored_in, values_of
from tests.trainer.tiny import batch, tokenizer
from tests.weights.hf.quantizing import model_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize("cast", ["fp8", "int4"])
@pytest.mark.parametrize("layout", ["TP2", "PP2"])
async def test_shards_are_gathered_before_they_are_cast(tmp_path, layout, cast):
    model_of("qwen3_moe").save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    folder, sink = tmp_path / cast, HostSink()
    cast_directory(tmp_path / "plain", folder, cast)
    begun = dict(named_weights(open_directory(folder, torch.float32)))
    with trainer_over(folder, layout, bucket_bytes=100_000) as trainer:
        await trainer.save(str(tmp_path / "before"))
        await trainer.update(batch())
        await trainer.save(str(tmp_path / "after"))
        await trainer.publish(sink, version=1)
        tensors = await sink.tensors()
    same(dict(named_weights(open_directory(tmp_path / "before", torch.float32))), begun)
    after = open_directory(tmp_path / "after", torch.float32)
    assert not torch.equal(after.lm_head.weight, begun["lm_head.weight"])
    assert tensors.keys() == stored_in(folder).keys()
    same(values_of(tensors, cast), expected_of(after, folder, cast))
    assert "quantization_config" not in json.loads((tmp_path / "after" / "config.json").read_text())


@pytest.mark.parametrize("kind", FAMILIES)
async def test_every_family_is_cast_as_it_is_published(tmp_path, kind):
    save_model(models.model_of(kind), tokenizer(), str(tmp_path / "plain"))
    folder, sink = tmp_path / "fp8", HostSink()
    assert cast_directory(tmp_path / "plain", folder, "fp8") > 10
    with trainer_over(folder, "TP2+SP") as trainer:
        await trainer.update(batch())
        await trainer.save(str(tmp_path / "after"))
        await trainer.publish(sink, version=1)
        tensors = await sink.tensors()
    assert tensors.keys() == stored_in(folder).keys()
    same(
        values_of(tensors, "fp8"),
        expected_of(open_directory(tmp_path / "after", torch.float32), folder, "fp8"),
    )
