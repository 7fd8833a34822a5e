"""The embedded engine says which experts each token went through: against every prefix by itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.sink import deliver
from agentrl.errors import EngineError
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.routing import expert_sizes
from tests.engine.routes import expect_routes, routes_of
from tests.engine.subjects import tiny
from tests.trainer.megatron.models import MIXTURES, model_of

KINDS = ["qwen3_moe", "glm4_moe"]


def rule_of(model: PreTrainedModel, tokens: int = 7, seed: int = 3, start: int = 0) -> Sampling:
    sizes = expert_sizes(model.config)
    assert sizes is not None
    return Sampling(tokens, seed=seed, return_routed_experts=sizes.layers, routed_experts_start_len=start)


@pytest.mark.parametrize("kind", sorted(MIXTURES))
async def test_every_family_says_what_it_chose(kind: str) -> None:
    model = model_of(kind)
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=60)
    prompt = [5, 17, 3, 60, 60, 2]
    completion = await engine.generate(prompt, rule_of(model), session="a")
    expect_routes(model, prompt, completion)
    plain = await engine.generate(prompt, replace(rule_of(model), return_routed_experts=None), session="b")
    assert not plain.extras
    assert not plain.prompt_extras
    assert plain.token_ids.tolist() == completion.token_ids.tolist()
    await engine.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_turns_of_many_sessions_in_few_slots(deterministic: bool) -> None:
    """Sessions lose their slots between turns, and tokens are taken back, so that caches are cut."""
    model = model_of("qwen3_moe")
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=90, deterministic=deterministic)

    async def converse(number: int) -> None:
        rng = np.random.default_rng(number)
        prefix, start = rng.integers(0, 97, rng.integers(1, 20)).tolist(), 0
        for turn in range(3):
            rule = rule_of(model, int(rng.integers(1, 9)), turn, start)
            completion = await engine.generate(prefix, rule, session=str(number))
            expect_routes(model, prefix, completion, start)
            kept = completion.token_ids.tolist()[: int(rng.integers(0, 9))]
            start = len(prefix) + len(kept) - 1
            prefix += [*kept, *rng.integers(0, 97, rng.integers(1, 6)).tolist()]

    await asyncio.gather(*(converse(number) for number in range(5)))
    await engine.close()


async def test_a_request_that_goes_on_has_those_of_its_first_pass() -> None:
    """Tokens of a stopped request are computed again, by newer weights: it keeps what was."""
    model, new = model_of("qwen3_moe"), model_of("qwen3_moe")
    for name, parameter in new.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.neg_()
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=60)
    prompt, rule = [5, 17, 3, 60, 2], rule_of(model, 6)
    begun = await engine.generate(prompt, rule, session="a")
    expect_routes(model, prompt, begun)
    await deliver(list(named_weights(new)), engine.sink, 1)
    whole = await engine.generate(prompt, replace(rule, max_new_tokens=11, continues=begun), session="b")
    ids = [*prompt, *whole.token_ids.tolist()]
    old, now = routes_of(model, ids), routes_of(new, ids)
    assert (old != now).any()
    size = len(prompt) + len(begun.token_ids) - 1
    rows = np.concatenate([part["routed_experts"].values for part in (whole.prompt_extras, whole.extras)])
    np.testing.assert_array_equal(np.sort(rows[:size], -1), old[:size])
    np.testing.assert_array_equal(np.sort(rows[size:-1], -1), now[size:-1])
    assert (rows[-1] == -1).all()
    await engine.close()


async def test_new_weights_amid_a_request_leave_the_experts_of_tokens_before() -> None:
    model, new = model_of("qwen3_moe"), model_of("qwen3_moe")
    for name, parameter in new.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.neg_()
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=90)
    prompt = [5, 17, 3, 60, 2]
    running = asyncio.create_task(engine.generate(prompt, rule_of(model, 40), session="a"))
    await asyncio.sleep(0.02)
    await deliver(list(named_weights(new)), engine.sink, 1)
    completion = await running
    versions = completion.versions.tolist()
    assert set(versions) == {0, 1}
    ids = [*prompt, *completion.token_ids.tolist()]
    rows = np.concatenate(
        [part["routed_experts"].values for part in (completion.prompt_extras, completion.extras)]
    )
    # A token is routed in the pass that samples the next one.
    size = len(prompt) + versions.index(1) - 1
    old, now = routes_of(model, ids), routes_of(new, ids)
    np.testing.assert_array_equal(np.sort(rows[:size], -1), old[:size])
    np.testing.assert_array_equal(np.sort(rows[size:-1], -1), now[size:-1])
    await engine.close()


async def test_an_aborted_request_has_those_of_its_tokens() -> None:
    model = model_of("qwen3_moe")
    engine = EmbeddedEngine.from_model(model, max_slots=2, max_context_len=90)
    running = asyncio.create_task(engine.generate([5, 3], rule_of(model, 60), session="a"))
    await asyncio.sleep(0.02)
    await engine.abort()
    completion = await running
    assert completion.finish is Finish.ABORT
    expect_routes(model, [5, 3], completion)
    await engine.close()


async def test_what_a_model_does_not_have_is_refused() -> None:
    mixture = model_of("qwen3_moe")
    dense = EmbeddedEngine.from_model(tiny("qwen3"), max_slots=1, max_context_len=30)
    with pytest.raises(EngineError, match="does not have"):
        await dense.generate([1], rule_of(mixture), session="a")
    engine = EmbeddedEngine.from_model(mixture, max_slots=1, max_context_len=30)
    with pytest.raises(EngineError, match="no experts from 3 on"):
        await engine.generate([1, 2], rule_of(mixture, start=3), session="a")
