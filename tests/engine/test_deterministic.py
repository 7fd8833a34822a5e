"""Deterministic inference: a completion is a function of weights, prompt and seed, bit for bit."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.decoder import Batch, Decoder
from agentrl.engine.embedded.parameters import Parameters
from agentrl.types import Completion
from agentrl.types.seams import Sampling
from agentrl.weights.codec import named_weights
from tests.engine.subjects import VOCAB, tiny

NUM_SLOTS = 5
NUM_SESSIONS = 9


def engine_of(name: str) -> EmbeddedEngine:
    return EmbeddedEngine.from_model(tiny(name), max_slots=NUM_SLOTS, max_context_len=250, deterministic=True)


async def played(engine: EmbeddedEngine, session: int, rng: random.Random | None = None) -> list[Completion]:
    """Three requests, each with the completion before it in its prompt; rng: of the pauses between them."""
    content = random.Random(session)
    prompt = [content.randrange(VOCAB) for _ in range(content.randint(1, 200))]
    completions = []
    for turn in range(3):
        for _ in range(rng.randrange(9) if rng else 0):
            await asyncio.sleep(0)
        sampling = Sampling(content.randint(2, 12), temperature=content.choice((0.0, 0.8, 1.0)), seed=turn)
        completions.append(await engine.generate(prompt, sampling, session=str(session)))
        world = [content.randrange(VOCAB) for _ in range(content.randint(0, 3))]
        prompt = [*prompt, *completions[-1].token_ids.tolist(), *world]
    return completions


@pytest.mark.parametrize("name", ["llama", "qwen3"])
async def test_a_completion_does_not_depend_on_what_else_is_decoded(name):
    alone = []
    for session in range(NUM_SESSIONS):
        engine = engine_of(name)
        alone.append(await played(engine, session))
        await engine.close()
    # More sessions than slots, in three orders of arrival: caches are evicted, and computed again.
    for order in range(3):
        engine, rng = engine_of(name), random.Random(order)
        sessions = rng.sample(range(NUM_SESSIONS), NUM_SESSIONS)
        together = await asyncio.gather(*(played(engine, session, rng) for session in sessions))
        await engine.close()
        for session, completions in zip(sessions, together, strict=True):
            for got, expected in zip(completions, alone[session], strict=True):
                assert np.array_equal(got.token_ids, expected.token_ids)
                assert got.logprobs.tobytes() == expected.logprobs.tobytes()


@torch.inference_mode()
def test_a_batch_that_gathers_may_have_several_tokens_of_a_slot():
    model = tiny("llama")
    architecture = read_architecture(model.config)
    parameters = Parameters.load(architecture, dict(named_weights(model)), torch.float32)
    tokens = np.array([[3], [5], [7], [9]])
    # Four rows from slot 0 to slot 3: as many as slots, which are not one each.
    slots, columns = np.array([0, 0, 2, 3]), np.array([[0], [1], [0], [0]])
    decoder = Decoder(architecture, 4, 8, torch.float32)
    logits = decoder.forward(parameters, Batch(slots, tokens, columns, 8, np.arange(4), gathers=True))
    texts = ([3], [3, 5], [7], [9])
    expected = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in texts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
