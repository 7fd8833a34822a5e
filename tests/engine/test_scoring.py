"""Logprobs of prompts: the embedded engine's and its server's, against float64 of transformers."""

from __future__ import annotations

import asyncio
import random

import httpx2
import numpy as np
import pytest
import torch

from agentrl.engine.embedded import EmbeddedEngine, step
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.types.seams import Sampling
from tests.engine.serving import embedded_server
from tests.engine.subjects import VOCAB, text_of, tiny

IDS = [1, 10, 20, 30, 7, 9, 11, 50]


def exact(model, ids):
    """log p(ids[t + 1] | ids[: t + 1]) of a float64 copy, token by token."""
    double = type(model)(model.config).double()
    double.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    scores = []
    for t in range(len(ids) - 1):
        with torch.no_grad():
            logits = double(torch.tensor([ids[: t + 1]])).logits[0, -1]
        scores.append((logits[ids[t + 1]] - torch.logsumexp(logits, 0)).item())
    return np.array(scores)


def drawn(number, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, length))] for _ in range(number)]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_scores_are_those_of_float64_beside_requests_that_sample(
    architecture, deterministic, monkeypatch
):
    monkeypatch.setattr(step, "_SCORED_LOGITS", 40 * VOCAB)  # several chunks of every batch
    model = tiny(architecture)
    engine = EmbeddedEngine.from_model(model, max_slots=5, decode=text_of, deterministic=deterministic)
    prompts = drawn(9, 70)
    alone = await engine.generate(IDS, Sampling(30, seed=3), session="alone")
    sampling = asyncio.create_task(engine.generate(IDS, Sampling(30, seed=3), session="beside"))
    starts = [len(prompt) // 3 if n % 2 else 0 for n, prompt in enumerate(prompts)]
    asked = [engine.score(prompts[n], start, session=f"s{n}") for n, start in enumerate(starts)]
    for ids, start, scores in zip(prompts, starts, await asyncio.gather(*asked), strict=True):
        np.testing.assert_allclose(scores, exact(model, ids)[start:], atol=2e-4)
    beside = await sampling
    assert beside.token_ids.tolist() == alone.token_ids.tolist()
    np.testing.assert_allclose(beside.logprobs, alone.logprobs, atol=2e-5)
    await engine.close()


async def test_a_session_goes_on_from_what_was_scored_and_is_scored_again_from_its_cache():
    model = tiny("qwen3")
    engine = EmbeddedEngine.from_model(model, max_slots=2, decode=text_of)
    first = await engine.score(IDS, 0, session="a")
    completion = await engine.generate(IDS, Sampling(6, temperature=0.0), session="a")
    assert completion.cached_tokens == len(IDS) - 1
    longer = [*IDS, *completion.token_ids.tolist()]
    again = await engine.score(longer, len(IDS) - 1, session="a")
    np.testing.assert_allclose(again, completion.logprobs, atol=1e-5)
    np.testing.assert_allclose(await engine.score(longer, 0, session="a"), exact(model, longer), atol=2e-4)
    np.testing.assert_allclose(first, exact(model, IDS), atol=2e-4)
    await engine.generate(IDS, Sampling(2), session="b")
    np.testing.assert_allclose(await engine.score(IDS, 0, session="b"), first, atol=1e-5)
    assert (await engine.score([5], 0, session="a")).tolist() == []
    with pytest.raises(RequestTooLargeError, match="max_context_len = 256"):
        await engine.score([1] * 257, 0, session="a")
    with pytest.raises(EngineError, match="cannot be scored from 9 on"):
        await engine.score(IDS, 9, session="a")
    await engine.close()


async def test_an_aborted_request_has_no_scores():
    engine = EmbeddedEngine.from_model(tiny("qwen3"), max_slots=2, decode=text_of)
    engine.pause()
    waiting = asyncio.create_task(engine.score(IDS, 0, session="a"))
    await asyncio.sleep(0.01)
    await engine.abort()
    assert await waiting is None
    await engine.close()


async def ask(url, **body):
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        answer = await http.post("/generate", json={"input_ids": IDS, "return_logprob": True, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


CASES = [
    {"logprob_start_len": start, "sampling_params": {"temperature": temperature, "max_new_tokens": new}}
    for start in (-1, 0, 3, 7, 8)
    for temperature, new in ((1.0, 0), (2.0, 0), (0.0, 2))
]


async def scored_replies(url):
    """What a server says of prompts, without what differs from run to run."""
    replies = [await ask(url, **case) for case in CASES]
    both = {"input_ids": [IDS, IDS[:5]], "logprob_start_len": [0, 2]}
    replies += await ask(url, **{**CASES[0], **both})
    names = ("input_token_logprobs", "output_token_logprobs", "finish_reason", "prompt_tokens")
    return [{"ids": r["output_ids"], **{name: r["meta_info"][name] for name in names}} for r in replies]


async def test_a_server_says_what_sglang_says():
    model = tiny("qwen3")
    async with embedded_server() as (url, _):
        reply = await ask(url, **CASES[6])
        entries = reply["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in entries] == IDS[3:]
        assert entries[0] == [None, IDS[3], None]
        np.testing.assert_allclose([e[0] for e in entries[1:]], exact(model, IDS)[3:], atol=2e-4)
        assert reply["output_ids"] == []
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert (await ask(url, **CASES[7]))["meta_info"]["input_token_logprobs"] == entries  # temperature
