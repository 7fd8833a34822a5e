"""Slots, limits, failures and construction of the embedded engine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.decoder import Decoder
from agentrl.errors import EngineError, ModelLoadError, RequestTooLargeError
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from tests.engine.subjects import VOCAB, text_of, tiny

MODEL = tiny("qwen3")


def engine_with(max_slots: int = 2, max_context_len: int = 64) -> EmbeddedEngine:
    return EmbeddedEngine.from_model(
        MODEL, max_slots=max_slots, max_context_len=max_context_len, decode=text_of
    )


@pytest.mark.parametrize(("max_slots", "max_context_len"), [(1, 16), (3, 50), (8, 200)])
async def test_the_cache_is_bounded_by_slots_and_context(max_slots: int, max_context_len: int) -> None:
    engine = engine_with(max_slots, max_context_len)
    before = engine.memory.cache_bytes
    # Keys and values, layers, key heads, head size, bytes; one scratch column a slot.
    assert before == 2 * 2 * 2 * 16 * 4 * max_slots * (max_context_len + 1)
    await asyncio.gather(*(engine.generate([1, 2, 3], Sampling(9), session=str(n)) for n in range(20)))
    assert engine.memory.cache_bytes == before
    await engine.close()
    assert engine.memory.cache_bytes == 0


async def test_a_completion_says_what_its_request_took() -> None:
    engine = engine_with(max_slots=1)
    began = time.perf_counter()
    done = await asyncio.gather(*(engine.generate([1, 2, 3], Sampling(9), session=str(n)) for n in range(2)))
    elapsed = time.perf_counter() - began
    first, second = (completion.seconds for completion in done)
    for each in (first, second):
        parts = (each.queue, each.prefill, each.decode)
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(each.request, abs=1e-6)
    assert first.request < second.request < elapsed
    assert second.queue >= first.prefill + first.decode, "it waits for the only slot"
    await engine.close()


async def test_context_is_at_most_max_position_embeddings() -> None:
    assert engine_with(1, 10_000).max_context_len == MODEL.config.max_position_embeddings


async def test_a_request_over_the_context_is_refused_in_one_sentence() -> None:
    with pytest.raises(RequestTooLargeError) as refusal:
        await engine_with().generate([1] * 60, Sampling(5), session="a")
    assert str(refusal.value) == (
        "a prompt of 60 tokens and max_new_tokens = 5 exceed max_context_len = 64; "
        "raise max_context_len or ask for fewer tokens."
    )


@pytest.mark.parametrize(
    ("prompt", "rule", "sentence"),
    [
        ([], Sampling(3), "needs a prompt"),
        ([1], Sampling(0), "at least one token"),
        ([1, VOCAB], Sampling(3), "from 1 to 61"),
        ([-1, 2], Sampling(3), "from -1 to 2"),
    ],
)
async def test_invalid_requests_are_refused(prompt: list[int], rule: Sampling, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        await engine_with().generate(prompt, rule, session="a")


async def test_stop_strings_without_a_decoder_are_refused() -> None:
    engine = EmbeddedEngine.from_model(MODEL, max_slots=1)
    with pytest.raises(EngineError, match="decode"):
        await engine.generate([1], Sampling(3, stop=("x",)), session="a")


async def test_the_session_used_longest_ago_loses_its_slot() -> None:
    engine = engine_with(max_slots=2)
    histories = {}
    for session in "aba":
        prompt = [5, 6, 7, *histories.get(session, [])]
        completion = await engine.generate(prompt, Sampling(5, seed=1), session=session)
        histories[session] = completion.token_ids.tolist()
    await engine.generate([9], Sampling(2), session="c")
    completion = await engine.generate([5, 6, 7, 1], Sampling(2), session="a")
    assert completion.cached_tokens == 3
    evicted = await engine.generate([5, 6, 7, *histories["b"]], Sampling(2), session="b")
    assert evicted.cached_tokens == 0


async def test_an_evicted_session_samples_the_same_as_a_cached_one() -> None:
    async def converse(engine: EmbeddedEngine, number: int) -> list[int]:
        prefix = [number, 2, 3]
        for turn in range(4):
            completion = await engine.generate(prefix, Sampling(5, seed=turn), session=str(number))
            prefix += [*completion.token_ids.tolist(), 4, turn]
        return prefix

    roomy, tight = engine_with(max_slots=9), engine_with(max_slots=2)
    want = await asyncio.gather(*(converse(roomy, number) for number in range(9)))
    assert await asyncio.gather(*(converse(tight, number) for number in range(9))) == want


async def test_a_session_that_comes_back_at_once_keeps_its_slot_while_others_wait() -> None:
    engine = engine_with(max_slots=1)

    async def converse(number: int) -> list[int]:
        prefix, cached = [number, 2, 3], []
        for turn in range(3):
            completion = await engine.generate(prefix, Sampling(3, seed=turn), session=str(number))
            cached.append(completion.cached_tokens)
            prefix += [*completion.token_ids.tolist(), 4]
        await engine.close_session(str(number))
        return cached

    assert await asyncio.gather(*(converse(n) for n in range(3))) == [[0, 5, 9]] * 3


async def test_closing_gaps_between_slots_changes_no_completion() -> None:
    """Long requests in high slots, idle sessions and free slots below them."""
    engine = engine_with(max_slots=24)
    reference = engine_with(max_slots=1)
    first = [engine.generate([n, 1], Sampling(2, seed=n), session=str(n)) for n in range(20)]
    long = [
        engine.generate([n, 8, 8], Sampling(40, seed=n, stop=("never",)), session=f"long{n}")
        for n in range(4)
    ]
    *short, a, b, c, d = await asyncio.gather(*first, *long)
    for n, completion in enumerate((a, b, c, d)):
        expected = await reference.generate([n, 8, 8], Sampling(40, seed=n), session=str(n))
        assert completion.token_ids.tolist() == expected.token_ids.tolist()
    # The idle sessions that were moved are in the slots of their caches.
    for n, before in enumerate(short):
        prefix = [n, 1, *before.token_ids.tolist(), 3]
        completion = await engine.generate(prefix, Sampling(6, seed=1), session=str(n))
        expected = await reference.generate(prefix, Sampling(6, seed=1), session=f"again{n}")
        assert completion.cached_tokens == 3
        assert completion.token_ids.tolist() == expected.token_ids.tolist()


async def test_a_stop_string_at_the_limit_is_a_stop() -> None:
    engine = engine_with()
    free = (await engine.generate([3, 4], Sampling(6, seed=3), session="a")).token_ids.tolist()
    stop = text_of(free[4:6])
    completion = await engine.generate([3, 4], Sampling(6, seed=3, stop=(stop,)), session="b")
    assert completion.finish is Finish.STOP
    assert completion.matched == stop


async def test_the_models_own_end_token_ends_a_completion() -> None:
    free = await engine_with().generate([3, 4], Sampling(6, seed=5), session="a")
    end = int(free.token_ids[2])
    assert end not in free.token_ids[:2]
    engine = EmbeddedEngine.from_model(MODEL, max_slots=1, eos_token_ids=(end,))
    completion = await engine.generate([3, 4], Sampling(6, seed=5), session="a")
    assert completion.token_ids.tolist() == free.token_ids[:3].tolist()
    assert completion.matched == end


class BrokenDecoderError(RuntimeError):
    pass


async def test_when_a_step_fails_every_request_fails_and_the_next_one_runs() -> None:
    calls = 0

    def decode(ids: object) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise BrokenDecoderError("no such word")
        return ""

    engine = EmbeddedEngine.from_model(MODEL, max_slots=2, max_context_len=64, decode=decode)
    rule = Sampling(20, stop=("x",))
    jobs = (engine.generate([1, n], rule, session=str(n)) for n in range(5))
    ended = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)
    assert [type(error) for error in ended] == [EngineError] * 5
    assert all("BrokenDecoderError: no such word" in str(error) for error in ended)
    completion = await asyncio.wait_for(engine.generate([1, 2], Sampling(3), session="0"), 30)
    assert len(completion.token_ids) == 3


async def test_closing_a_session_ends_the_request_that_runs_in_it() -> None:
    engine = engine_with(max_slots=1)
    running = asyncio.create_task(engine.generate([1], Sampling(60), session="a"))
    waiting = asyncio.create_task(engine.generate([1], Sampling(2), session="b"))
    for _ in range(30):
        await asyncio.sleep(0)
    await engine.close_session("a")
    assert (await running).finish is Finish.ABORT
    assert len((await running).token_ids) > 0
    assert len((await waiting).token_ids) == 2


def test_an_engine_serves_one_event_loop_after_another() -> None:
    engine = engine_with()
    for session in "ab":
        completion = asyncio.run(engine.generate([1, 2], Sampling(3), session=session))
        assert len(completion.token_ids) == 3
    asyncio.run(engine.close())


async def test_training_the_model_does_not_change_the_engines_weights() -> None:
    model = tiny("qwen3", seed=5)
    engine = EmbeddedEngine.from_model(model, max_slots=1)
    before = await engine.generate([1, 2], Sampling(8, temperature=0.0), session="a")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = await engine.generate([1, 2], Sampling(8, temperature=0.0), session="b")
    assert after.logprobs.tolist() == before.logprobs.tolist()


async def test_a_saved_model_serves_as_the_one_in_memory(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_pretrained(tmp_path, max_slots=1, max_context_len=64)
    completion = await engine.generate([1, 2], Sampling(8, seed=1), session="a")
    expected = await engine_with().generate([1, 2], Sampling(8, seed=1), session="a")
    assert completion.token_ids.tolist() == expected.token_ids.tolist()


def test_broken_directories_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config.json"):
        EmbeddedEngine.from_pretrained(tmp_path / "nowhere")
    MODEL.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp" not in k}, weights, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 3 tensors, model.layers.1.mlp"):
        EmbeddedEngine.from_pretrained(tmp_path)
    weights.write_bytes(b"not a model")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        EmbeddedEngine.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        EmbeddedEngine.from_pretrained(tmp_path)


def test_probabilities_that_depend_on_earlier_sequences_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelLoadError, match=r"`dynamic` position scaling .* choose another model"):
        EmbeddedEngine.from_model(tiny("qwen3", rope_parameters=rope))


async def test_a_cancelled_request_frees_its_slot_at_once() -> None:
    engine = engine_with(max_slots=2, max_context_len=256)
    ended: list[str] = []

    async def sample(name: str, num_tokens: int) -> None:
        await engine.generate([1, 2, 3], Sampling(num_tokens), session=name)
        ended.append(name)

    gone = asyncio.create_task(sample("gone", 200))
    steady = asyncio.create_task(sample("steady", 40))
    for _ in range(20):
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(sample("next", 2), steady)
    assert ended == ["next", "steady"]
    await engine.close()


def resident_bytes():
    """The memory of this process that the system has provided."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_short_sequences_in_long_slots_take_memory_for_their_tokens_alone():
    architecture = read_architecture(tiny("qwen3", max_position_embeddings=65_536).config)
    decoder = Decoder(architecture, num_slots=16, context_len=65_536, dtype=torch.float32)
    before = resident_bytes()
    decoder._kv[..., :32, :] = 1.0
    assert decoder.num_bytes > 50 * 2**20
    assert resident_bytes() - before < decoder.num_bytes / 10
