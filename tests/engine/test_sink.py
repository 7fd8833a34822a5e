"""New weights arrive complete and become the served version, or nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine, sink
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.parameters import Parameters
from agentrl.errors import EngineError
from agentrl.types import Completion
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, named_weights, pack_buckets
from tests.engine.subjects import logits_of, tiny

OLD = tiny("qwen3", seed=0)
NEW = tiny("qwen3", seed=1)
UNTIED = tiny("qwen3", seed=0, tie_word_embeddings=False)
HEAD = "lm_head.weight"
NamedTensors = list[tuple[str, torch.Tensor]]


def engine_of(model: PreTrainedModel = OLD, dtype: torch.dtype = torch.float32) -> EmbeddedEngine:
    return EmbeddedEngine.from_model(deepcopy(model).to(dtype), max_slots=2, max_context_len=64)


async def send(
    engine: EmbeddedEngine, tensors: NamedTensors, *, version: int = 1, max_bytes: int = 5_000
) -> None:
    async with engine.sink.begin(manifest_of(tensors), version) as transaction:
        for bucket in pack_buckets(tensors, max_bytes):
            await transaction.put(bucket)
        await transaction.commit(checksum(tensors))


async def expect_serving(engine: EmbeddedEngine, model: PreTrainedModel, version: int) -> Completion:
    completion = await engine.generate([1, 2, 3], Sampling(5, seed=1), session="probe")
    await engine.close_session("probe")
    rows = torch.from_numpy(logits_of(model, [1, 2, 3, *completion.token_ids.tolist()]))
    expected = rows[2:-1].log_softmax(-1)[range(5), completion.token_ids.tolist()]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=1e-5)
    assert engine.version == version
    assert set(completion.versions.tolist()) == {version}
    return completion


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_can_be_read_back_bit_for_bit(architecture: str, dtype: torch.dtype) -> None:
    """Large enough that some matrices are packed, with biases where there can be any."""
    changes = {"mlp_bias": True} if architecture == "llama" else {}
    model = tiny(
        architecture, hidden_size=256, intermediate_size=600, attention_bias=True, head_dim=32, **changes
    )
    sent = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    loaded = dict(Parameters.load(read_architecture(model.config), sent, dtype).named_tensors())
    assert sent.keys() <= loaded.keys()
    for name, tensor in sent.items():
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("max_bytes", [1, 5_000, 1 << 30])
async def test_buckets_of_any_size_deliver_the_model(max_bytes: int) -> None:
    engine = engine_of()
    await expect_serving(engine, OLD, 0)
    await send(engine, list(named_weights(NEW)), version=7, max_bytes=max_bytes)
    await expect_serving(engine, NEW, 7)


async def test_tied_weights_may_be_sent_under_both_names() -> None:
    engine = engine_of()
    await send(engine, list(NEW.state_dict().items()))
    await expect_serving(engine, NEW, 1)


async def test_tied_weights_that_differ_are_refused() -> None:
    engine = engine_of()
    state = dict(NEW.state_dict()) | {"lm_head.weight": OLD.state_dict()["lm_head.weight"]}
    with pytest.raises(EngineError, match="arrived damaged"):
        await send(engine, list(state.items()))
    await expect_serving(engine, OLD, 0)


async def test_weights_of_another_dtype_are_checked_and_then_cast() -> None:
    engine = engine_of(dtype=torch.bfloat16)
    await send(engine, list(named_weights(NEW)))
    cast = engine_of(NEW, torch.bfloat16)
    rule = Sampling(8, temperature=0.0)
    completion, expected = [await e.generate([1, 2], rule, session="a") for e in (engine, cast)]
    assert completion.logprobs.tolist() == expected.logprobs.tolist()


@pytest.mark.parametrize("part", ["load_layer", "load_embedding", "load_norm", "load_head"])
async def test_weights_that_were_loaded_wrongly_are_refused(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    right = getattr(sink, part)

    def wrong(*arguments: object) -> object:
        return right(*(damaged(value) if isinstance(value, dict) else value for value in arguments))

    def damaged(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        last = max(tensors)
        return {**tensors, last: tensors[last] + 1}

    engine = engine_of(UNTIED)
    monkeypatch.setattr(sink, part, wrong)
    with pytest.raises(EngineError, match="arrived damaged"):
        await send(engine, list(named_weights(tiny("qwen3", seed=1, tie_word_embeddings=False))))
    await expect_serving(engine, UNTIED, 0)


@pytest.mark.parametrize("tied", [True, False])
async def test_a_head_is_read_back_also_where_it_is_the_embedding(tied: bool) -> None:
    engine = engine_of(tiny("qwen3", seed=0, tie_word_embeddings=tied))
    model = tiny("qwen3", seed=1, tie_word_embeddings=tied)
    tensors = [(name, tensor) for name, tensor in named_weights(model) if name != HEAD]
    embedding = dict(tensors)["model.embed_tokens.weight"]
    head = embedding if tied else model.lm_head.weight.detach()
    for order in (tensors, tensors[::-1]):
        await send(engine, [*order, (HEAD, head)])
        await expect_serving(engine, model, 1)
    if tied:
        with pytest.raises(EngineError, match="arrived damaged"):
            await send(engine, [(HEAD, head + 1), *tensors])


@pytest.mark.parametrize("max_bytes", [5_000, 100_000_000])
async def test_the_memory_of_a_bucket_can_be_reused(max_bytes: int) -> None:
    engine, tensors = engine_of(), list(named_weights(NEW))
    async with engine.sink.begin(manifest_of(tensors[::-1]), 1) as transaction:
        for bucket in pack_buckets(tensors[::-1], max_bytes):
            await transaction.put(bucket)
            bucket.data[:] = 255
        await transaction.commit(checksum(tensors))
    await expect_serving(engine, NEW, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors[1:], "lacks 1 tensors"),
        (lambda tensors: [*tensors, ("model.layers.9.x", torch.zeros(2))], "no such tensor"),
        (
            lambda tensors: [(n, t[:1] if n == "model.norm.weight" else t) for n, t in tensors],
            r"shape \(1,\)",
        ),
    ],
    ids=["one missing", "one too many", "one of another shape"],
)
async def test_a_manifest_of_another_model_is_refused_at_once(change: object, sentence: str) -> None:
    assert callable(change)
    engine = engine_of()
    manifest = manifest_of(change(list(named_weights(NEW))))
    with pytest.raises(EngineError, match=sentence):
        async with engine.sink.begin(manifest, 1):
            raise AssertionError("the transaction must not begin")
    await expect_serving(engine, OLD, 0)


async def test_a_tensor_that_comes_twice_is_refused() -> None:
    engine = engine_of()
    tensors = list(named_weights(NEW))
    (bucket, *_) = pack_buckets(tensors, 1)
    async with engine.sink.begin(manifest_of(tensors), 1) as transaction:
        await transaction.put(bucket)
        with pytest.raises(EngineError, match="came twice"):
            await transaction.put(bucket)
    await expect_serving(engine, OLD, 0)


async def test_a_bucket_cut_short_is_refused() -> None:
    engine = engine_of()
    tensors = list(named_weights(NEW))
    (bucket, *_) = pack_buckets(tensors, 1)
    async with engine.sink.begin(manifest_of(tensors), 1) as transaction:
        with pytest.raises(EngineError, match="cannot be read"):
            await transaction.put(bucket._replace(data=bucket.data[:-4]))
    await expect_serving(engine, OLD, 0)


async def test_leaving_without_commit_changes_nothing() -> None:
    engine = engine_of()
    tensors = list(named_weights(NEW))
    async with engine.sink.begin(manifest_of(tensors), 1) as transaction:
        for bucket in pack_buckets(tensors, 1 << 20):
            await transaction.put(bucket)
    await expect_serving(engine, OLD, 0)


async def test_a_long_completion_goes_through_several_versions() -> None:
    """Each token is sampled from the weights of its version, regardless of the cache before."""
    models = {0: OLD, 1: NEW, 2: tiny("qwen3", seed=2)}
    engine = engine_of()
    task = asyncio.create_task(engine.generate([4, 5], Sampling(60, seed=3), session="a"))
    for version in (1, 2):
        # A short concurrent request: when it has ended, the long one has at least as many tokens.
        await engine.generate([9], Sampling(15), session=f"pace{version}")
        engine.pause()
        await send(engine, list(named_weights(models[version])), version=version, max_bytes=1 << 30)
        engine.resume()
    completion = await task
    assert set(completion.versions.tolist()) == {0, 1, 2}
    ids = [4, 5, *completion.token_ids.tolist()]
    for version, model in models.items():
        expected = torch.from_numpy(logits_of(model, ids))[1:-1].log_softmax(-1)[range(60), ids[2:]].numpy()
        mine = completion.versions == version
        np.testing.assert_allclose(completion.logprobs[mine], expected[mine], atol=1e-5)
