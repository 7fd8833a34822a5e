"""Every family that trains also plays: transformers' own model behind the embedded engine's seam, exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.sink import deliver, update_from_disk
from agentrl.types.seams import Sampling
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.export import save_model
from tests.engine.subjects import logits_of
from tests.trainer.families import FAMILIES, family
from tests.trainer.tiny import VOCAB, tokenizer

TABLED = {"llama", "mimo", "qwen2", "qwen3"}
OTHERS = sorted(FAMILIES.keys() - TABLED)
# Recurrences and experts sum in another order, token by token.
CLOSE = 2e-3


def test_these_are_the_families_without_a_table() -> None:
    assert {name for name in FAMILIES if read_architecture(family(name).config) is not None} == TABLED


def expect_exact(model: PreTrainedModel, prompt: list[int], completion, temperature: float) -> None:
    rows = logits_of(model, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 : -1] / temperature
    expected = torch.from_numpy(rows).double().log_softmax(-1).numpy()
    at = expected[np.arange(len(rows)), completion.token_ids]
    np.testing.assert_allclose(completion.logprobs, at, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("name", OTHERS)
async def test_ragged_conversations_are_exact(name: str) -> None:
    """With two slots, sessions lose theirs between turns; a turn that is taken back cuts the cache."""
    model = family(name).float()
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=100)

    async def converse(number: int) -> None:
        rng = np.random.default_rng(number)
        prefix = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        temperature = (0.7, 1.0, 1.3)[number % 3]
        for turn in range(3):
            rule = Sampling(int(rng.integers(1, 10)), temperature=temperature, seed=turn)
            completion = await engine.generate(prefix, rule, session=str(number))
            expect_exact(model, prefix, completion, temperature)
            kept = completion.token_ids.tolist()[: int(rng.integers(0, 10))]
            prefix += [*kept, *rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()]

    await asyncio.gather(*(converse(number) for number in range(4)))
    assert engine.memory.cache_bytes > 0
    await engine.close()
    assert engine.memory.cache_bytes == 0


@pytest.mark.parametrize("name", OTHERS)
async def test_new_weights_serve_at_once_and_are_read_back(name: str, tmp_path: Path) -> None:
    model, new = (family(name, seed=seed).float() for seed in (1, 2))
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=64)
    # Beyond the length at which phi3_longrope turns its positions in another way.
    prompt = [1, 2, 3, 4] * 3
    await engine.generate(prompt, Sampling(4, seed=1), session="a")
    await deliver(list(named_weights(new)), engine.sink, 1)
    completion = await engine.generate(prompt, Sampling(6, seed=1), session="a")
    assert completion.versions.tolist() == [1] * 6
    expect_exact(new, prompt, completion, 1.0)
    save_model(model, tokenizer(), str(tmp_path / "saved"))
    assert await update_from_disk(engine.sink, str(tmp_path / "saved"), 2) == checksum(named_weights(model))
    expect_exact(model, prompt, await engine.generate(prompt, Sampling(6, seed=2), session="a"), 1.0)
    await engine.close()


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3_moe"])
async def test_scores_are_those_of_the_model(name: str) -> None:
    model = family(name).float()
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=64)
    ids = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    scores = await engine.score(ids, 3, session="a")
    expected = torch.from_numpy(logits_of(model, ids)).double().log_softmax(-1)[3:-1]
    at = expected.gather(1, torch.tensor(ids[4:])[:, None])[:, 0]
    np.testing.assert_allclose(scores, at, atol=CLOSE, rtol=0)
    await engine.close()
