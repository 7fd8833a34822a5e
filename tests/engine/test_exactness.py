"""The embedded engine samples the same tokens and logprobs as transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.types import Completion
from agentrl.types.seams import Sampling
from agentrl.weights.codec import named_weights
from tests.engine.subjects import VOCAB, logits_of, tiny

CLOSE = 1e-5

VARIANTS = {
    "qwen3": tiny("qwen3"),
    "qwen3 untied, one key head, bias": tiny(
        "qwen3", tie_word_embeddings=False, num_key_value_heads=1, attention_bias=True
    ),
    "llama": tiny("llama"),
    "llama tied, own key for each head, biases": tiny(
        "llama", tie_word_embeddings=True, num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "llama with llama3 position scaling": tiny(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
QWEN2 = {
    "qwen2": tiny("qwen2"),
    # Rows of six numbers are no multiple of 16 bytes.
    "qwen2 untied, one key head, heads of their own size": tiny(
        "qwen2", tie_word_embeddings=False, num_key_value_heads=1, head_dim=6
    ),
    "qwen2 with own key for each head, yarn, windows that no layer has": tiny(
        "qwen2",
        num_key_value_heads=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
VARIANTS |= QWEN2
variants = pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)


def expect_exact(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, temperature: float
) -> None:
    rows = logits_of(model, [*prompt, *completion.token_ids.tolist()])[len(prompt) - 1 : -1].astype(
        np.float64
    )
    if temperature == 0:
        assert (rows.max(-1) - rows[np.arange(len(rows)), completion.token_ids] <= CLOSE).all()
    rows /= temperature or 1.0
    rows -= np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) + rows.max(
        -1, keepdims=True
    )
    np.testing.assert_allclose(
        completion.logprobs, rows[np.arange(len(rows)), completion.token_ids], atol=CLOSE, rtol=0
    )


@variants
async def test_greedy_is_what_transformers_generates(model: PreTrainedModel) -> None:
    engine = EmbeddedEngine.from_model(model, max_slots=4, max_context_len=96)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 5, 17, 33, 40, 2)]
    rule = Sampling(24, temperature=0.0)
    completions = await asyncio.gather(
        *(engine.generate(prompt, rule, session=str(n)) for n, prompt in enumerate(prompts))
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
        )
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        expect_exact(model, prompt, completion, 0.0)


@variants
@pytest.mark.parametrize("max_slots", [2, 8])
async def test_ragged_conversations_are_exact(model: PreTrainedModel, max_slots: int) -> None:
    """With two slots, sessions lose theirs between turns and are computed again."""
    engine = EmbeddedEngine.from_model(model, max_slots=max_slots, max_context_len=160)

    async def converse(number: int) -> None:
        rng = np.random.default_rng(number)
        prefix = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
        temperature = (0.0, 0.7, 1.0, 1.3)[number % 4]
        for turn in range(4):
            rule = Sampling(int(rng.integers(1, 12)), temperature=temperature, top_p=0.95, seed=turn)
            completion = await engine.generate(prefix, rule, session=str(number))
            expect_exact(model, prefix, completion, temperature)
            prefix += [*completion.token_ids.tolist(), *rng.integers(0, VOCAB, rng.integers(0, 9)).tolist()]
        await engine.close_session(str(number))

    await asyncio.gather(*(converse(number) for number in range(7)))


@variants
def test_the_tensors_are_the_models_own(model: PreTrainedModel) -> None:
    """The table of another family has other biases, or norms of heads."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_weights(model)}
    assert read_architecture(model.config).shapes() == shapes


@pytest.mark.parametrize("part", ["q_proj.bias", "k_proj.bias", "v_proj.bias"])
async def test_every_bias_of_a_qwen2_counts(part: str) -> None:
    model, prompt = deepcopy(QWEN2["qwen2"]), [7, 3, 9, 20]
    before = await sampled(model, prompt)
    with torch.no_grad():
        bias = dict(model.named_parameters())[f"model.layers.1.self_attn.{part}"]
        bias.copy_(torch.linspace(-2, 2, bias.numel()))
    after = await sampled(model, prompt)
    expect_exact(model, prompt, after, 1.0)
    assert np.abs(after.logprobs[:1] - before.logprobs[:1]).max() > 100 * CLOSE


async def sampled(model: PreTrainedModel, prompt: Sequence[int]) -> Completion:
    engine = EmbeddedEngine.from_model(model, max_slots=1, max_context_len=32)
    return await engine.generate(prompt, Sampling(4, seed=1), session="a")


@settings(max_examples=15)
@given(data=st.data())
def test_any_history_of_a_session_is_exact(data: st.DataObject) -> None:
    """Prefixes that grow, shrink or are rewritten: the cache changes no result."""
    model = VARIANTS["qwen3"]
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)

    async def play() -> None:
        engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=128)
        histories: dict[str, list[int]] = {}
        for turn in range(5):
            session = data.draw(st.sampled_from("abc"))
            old = histories.get(session, [])
            prefix = old[: data.draw(st.integers(0, len(old)))] + data.draw(tokens)
            completion = await engine.generate(prefix[-100:], Sampling(4, seed=turn), session=session)
            expect_exact(model, prefix[-100:], completion, 1.0)
            histories[session] = prefix[-100:] + completion.token_ids.tolist()

    asyncio.run(play())


async def test_a_prompt_longer_than_a_prefill_batch_is_exact() -> None:
    model = tiny("qwen3", max_position_embeddings=4096)
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=2600)
    prompts = [np.random.default_rng(n).integers(0, VOCAB, 2500 - 300 * n).tolist() for n in range(2)]
    completions = await asyncio.gather(
        *(engine.generate(p, Sampling(3, seed=1), session=str(p[0])) for p in prompts)
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        rows = torch.from_numpy(logits_of(model, [*prompt, *completion.token_ids.tolist()]))
        expected = rows[len(prompt) - 1 : -1].log_softmax(-1)[range(3), completion.token_ids.tolist()]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=5e-5)


async def test_bfloat16_weights_stay_close_to_their_own_model() -> None:
    model = tiny("llama", hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=64)
    prompt = list(range(20))
    completion = await engine.generate(prompt, Sampling(8, seed=1), session="a")
    rows = torch.from_numpy(logits_of(model.float(), [*prompt, *completion.token_ids.tolist()]))
    expected = rows[len(prompt) - 1 : -1].log_softmax(-1)[range(8), completion.token_ids.tolist()]
    model.to(torch.bfloat16)
    assert np.abs(completion.logprobs - expected.numpy()).max() < 0.15
