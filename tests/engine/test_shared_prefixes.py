"""What several requests begin with is computed once, and changes no result."""

from __future__ import annotations

import asyncio
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import Completion
from agentrl.types.seams import Sampling
from tests.engine.subjects import VOCAB, delivery_of, logits_of, tiny
from tests.engine.test_exactness import expect_exact

MODEL = tiny("llama")


def prompt_of(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size).tolist()


async def answered(engine: EmbeddedEngine, prompts: list[list[int]], start: int = 0) -> list[Completion]:
    rules = [Sampling(6, seed=number) for number in range(len(prompts))]
    return await asyncio.gather(
        *(
            engine.generate(prompt, rule, session=str(start + number))
            for number, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
        )
    )


async def test_siblings_share_their_prompt() -> None:
    engine = EmbeddedEngine.from_model(MODEL, max_slots=8, max_context_len=64)
    prompts = [prompt_of(group, 40) for group in (1, 2) for _ in range(4)]
    completions = await answered(engine, prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        expect_exact(MODEL, prompt, completion, 1.0)
    assert sorted(completion.cached_tokens for completion in completions) == [0, 0, *[39] * 6]
    assert len({tuple(completion.token_ids.tolist()) for completion in completions}) == 8


@pytest.mark.parametrize("max_slots", [2, 3, 12])
async def test_all_share_a_system_prompt_also_with_those_that_are_done(max_slots: int) -> None:
    engine = EmbeddedEngine.from_model(MODEL, max_slots=max_slots, max_context_len=96)
    system = prompt_of(0, 24)
    prompts = [system + prompt_of(number, 5 + number) for number in range(1, 10)]
    completions = await answered(engine, prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        expect_exact(MODEL, prompt, completion, 1.0)
    cached = sorted(completion.cached_tokens for completion in completions)
    assert cached[0] == 0
    assert cached[1] >= 24


async def test_a_session_that_is_closed_leaves_its_prompt_to_the_next() -> None:
    engine = EmbeddedEngine.from_model(MODEL, max_slots=1, max_context_len=96)
    prompt = prompt_of(0, 24)
    await answered(engine, [prompt])
    await engine.close_session("0")
    (later,) = await answered(engine, [prompt], start=1)
    assert later.cached_tokens == 23
    expect_exact(MODEL, prompt, later, 1.0)


async def test_a_prompt_longer_than_a_prefill_batch_is_shared() -> None:
    model = tiny("llama", max_position_embeddings=4096)
    engine = EmbeddedEngine.from_model(model, max_slots=3, max_context_len=2600)
    prompt = prompt_of(1, 2500)
    completions = await answered(engine, [prompt, prompt, prompt[:2200]])
    for asked, completion in zip((prompt, prompt, prompt[:2200]), completions, strict=True):
        rows = torch.from_numpy(logits_of(model, [*asked, *completion.token_ids.tolist()]))
        expected = rows[len(asked) - 1 : -1].log_softmax(-1)[range(6), completion.token_ids.tolist()]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=5e-5)
    assert sorted(completion.cached_tokens for completion in completions) == [0, 2199, 2499]


async def test_nothing_of_older_weights_is_shared() -> None:
    other = deepcopy(MODEL)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine = EmbeddedEngine.from_model(MODEL, max_slots=8, max_context_len=64)
    prompts = [prompt_of(1, 40)] * 3
    await answered(engine, prompts)
    new = delivery_of(other)
    async with engine.sink.begin(new.manifest, 1) as update:
        for bucket in new.buckets:
            await update.put(bucket)
        await update.commit(new.checksum)
    for completion in await answered(engine, prompts, start=3):
        expect_exact(other, prompts[0], completion, 1.0)


@settings(max_examples=20)
@given(data=st.data())
def test_any_tree_of_conversations_is_exact(data: st.DataObject) -> None:
    """Prompts that branch anywhere, in any order, over few slots, with turns that follow."""
    pieces = [prompt_of(seed, 18) for seed in range(3)]

    async def play() -> None:
        engine = EmbeddedEngine.from_model(MODEL, max_slots=data.draw(st.integers(1, 5)), max_context_len=128)
        histories: dict[int, list[int]] = {}
        for _ in range(3):
            chosen = st.lists(st.integers(0, 2), min_size=1, max_size=3)
            prompts = {
                session: (histories.get(session, []) + [t for piece in drawn for t in pieces[piece]])[-110:]
                for session, drawn in data.draw(
                    st.dictionaries(st.integers(0, 6), chosen, min_size=1)
                ).items()
            }
            rule = Sampling(4, seed=1)
            completions = await asyncio.gather(
                *(engine.generate(p, rule, session=str(s)) for s, p in prompts.items())
            )
            for (session, prompt), completion in zip(prompts.items(), completions, strict=True):
                expect_exact(MODEL, prompt, completion, 1.0)
                histories[session] = prompt + completion.token_ids.tolist()

    asyncio.run(play())
