"""Tokens a second: SGLang, the embedded engine in this process and over HTTP, transformers' generate.

The same model, the same requests, one thread each; lengths are forced: no stop, no end token. Every run draws
new prompts, so that no cache of prefixes helps. transformers takes requests in batches of the concurrency.
All sample at temperature 1; all but transformers return logprobs as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.errors import EngineError
from agentrl.types import JSON
from agentrl.types.seams import RunningPolicy, Sampling
from benchmarks.compare import Side, rates
from benchmarks.engines.context import (
    EmbeddedServer,
    EngineContext,
    at_once,
    up,
)
from benchmarks.engines.embedded import BASE, EMBEDDED, generate
from benchmarks.engines.settings import EngineSettings, GenerationLoad
from benchmarks.models import save, seeded, tiny_model, vocab_size
from benchmarks.sections import ResultRow

EMBEDDED_HTTP = "embedded over HTTP"
SGLANG = "SGLang"


async def bench(context: EngineContext) -> list[ResultRow]:
    """A row for each load, over servers that are started for it."""
    network = seeded(tiny_model)
    folder = save(network, context.folder / "throughput" / "model")
    max_concurrency, context_len = _sizes(context.settings)
    embedded = EmbeddedServer(folder, slots=max_concurrency, context_len=context_len)
    async with context.sglang(folder) as servers, up(embedded) as url:
        return await measured(network, {SGLANG: servers.url, EMBEDDED_HTTP: url}, context)


async def measured(
    network: PreTrainedModel, urls: Mapping[str, str], context: EngineContext
) -> list[ResultRow]:
    """A row for each load. urls: of servers that serve the same model, by side."""
    max_concurrency, context_len = _sizes(context.settings)
    policies: dict[str, RunningPolicy] = {
        side: SGLangPolicy(url, max_concurrency=max_concurrency, vocab_size=vocab_size(network))
        for side, url in urls.items()
    }
    policies[EMBEDDED] = EmbeddedEngine.from_model(
        network, max_slots=max_concurrency, max_context_len=context_len, eos_token_ids=()
    )
    try:
        return [await _row(network, policies, load, context) for load in context.settings.loads]
    finally:
        for policy in policies.values():
            await policy.close()


async def _row(
    network: PreTrainedModel,
    policies: Mapping[str, RunningPolicy],
    load: GenerationLoad,
    context: EngineContext,
) -> ResultRow:
    size = vocab_size(network)
    sides: dict[str, Side] = {
        name: _with_new_prompts(load, size, partial(_send_all, policy, load))
        for name, policy in policies.items()
    }
    sides[BASE] = _with_new_prompts(load, size, partial(_generate_all, network, load))
    result = await rates(sides, load.requests * load.new, "tokens_per_s", repeats=context.settings.repeats)
    line = ", ".join(f"{side} {result.medians[side]:.0f}" for side in sides) + " tokens/s"
    ratios: dict[str, JSON] = {side: result.medians[side] / result.medians[BASE] for side in sides}
    name = f"throughput, {load.concurrency} at once"
    context.on_event(f"{name}: {line}")
    return ResultRow(name, line, {"sides": result.figures, f"ratios_to_{BASE}": ratios})


def _sizes(settings: EngineSettings) -> tuple[int, int]:
    """The greatest concurrency, and the length of the longest request."""
    loads = settings.loads
    return max(load.concurrency for load in loads), max(load.prompt + load.new for load in loads)


def _with_new_prompts(
    load: GenerationLoad, size: int, run: Callable[[int, list[list[int]]], Awaitable[None]]
) -> Side:
    """A side with new prompts in every run; the n-th run of every side has the same prompts."""
    runs = itertools.count()

    async def side() -> None:
        number = next(runs)
        token_ids = np.random.default_rng(number).integers(1, size, (load.requests, load.prompt))
        await run(number, token_ids.tolist())

    return side


async def _send_all(policy: RunningPolicy, load: GenerationLoad, run: int, prompts: list[list[int]]) -> None:
    async def send(number: int) -> None:
        session = f"{run}-{number}"
        completion = await policy.generate(prompts[number], Sampling(load.new, seed=number), session=session)
        if len(completion.token_ids) != load.new:
            raise EngineError(
                f"{len(completion.token_ids)} tokens were returned where {load.new} were requested."
            )
        await policy.close_session(session)

    await at_once(send, load.requests, load.concurrency)


async def _generate_all(
    network: PreTrainedModel, load: GenerationLoad, run: int, prompts: list[list[int]]
) -> None:
    del run
    for start in range(0, len(prompts), load.concurrency):
        generate(network, prompts[start : start + load.concurrency], load.new)
