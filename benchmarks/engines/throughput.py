"""Tokens a second: SGLang, the embedded engine in this process and over HTTP, transformers' generate.

The same model, the same requests, one thread each; lengths are forced: no stop, no end token. Every run draws
new prompts, so that no cache of prefixes helps. transformers takes requests in batches of the concurrency.
All sample at temperature 1; all but transformers return logprobs as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.sglang import SGLangPolicy
from agentrl.errors import EngineError
from agentrl.protocols import RunningPolicy, Sampling
from agentrl.types import JSON
from benchmarks.compare import Side, rates
from benchmarks.engine import tiny_model
from benchmarks.engines.place import Place, Row, Served, at_once, save, seeded, up, vocab_size
from benchmarks.engines.settings import Load, Settings

BASE = "transformers"
EMBEDDED = "embedded"
SERVED = "embedded over HTTP"
SGLANG = "SGLang"


async def bench(place: Place) -> list[Row]:
    """A row for each load, over servers that are started for it."""
    network = seeded(tiny_model)
    folder = save(network, place.folder / "throughput" / "model")
    most, context_len = _sizes(place.settings)
    served = Served(folder, slots=most, context_len=context_len)
    async with place.sglang(folder) as servers, up(served) as url:
        return await measured(network, {SGLANG: servers.url, SERVED: url}, place)


async def measured(network: PreTrainedModel, urls: Mapping[str, str], place: Place) -> list[Row]:
    """A row for each load. urls: of servers that serve the same model, by side."""
    most, context_len = _sizes(place.settings)
    policies: dict[str, RunningPolicy] = {
        side: SGLangPolicy(url, max_concurrency=most, vocab_size=vocab_size(network))
        for side, url in urls.items()
    }
    policies[EMBEDDED] = EmbeddedEngine.from_model(
        network, max_slots=most, max_context_len=context_len, eos_token_ids=()
    )
    try:
        return [await _row(network, policies, load, place) for load in place.settings.loads]
    finally:
        for policy in policies.values():
            await policy.close()


async def _row(
    network: PreTrainedModel, policies: Mapping[str, RunningPolicy], load: Load, place: Place
) -> Row:
    size = vocab_size(network)
    sides: dict[str, Side] = {
        name: _anew(load, size, partial(_asked, policy, load)) for name, policy in policies.items()
    }
    sides[BASE] = _anew(load, size, partial(_generated, network, load))
    found = await rates(sides, load.requests * load.new, "tokens_per_s", repeats=place.settings.repeats)
    line = ", ".join(f"{side} {found.medians[side]:.0f}" for side in sides) + " tokens/s"
    ratios: dict[str, JSON] = {side: found.medians[side] / found.medians[BASE] for side in sides}
    name = f"throughput, {load.concurrency} at once"
    place.on_event(f"{name}: {line}")
    return Row(name, line, {"sides": found.told, f"ratios_to_{BASE}": ratios})


def _sizes(settings: Settings) -> tuple[int, int]:
    """How many requests run at once at most, and how long the longest is."""
    loads = settings.loads
    return max(load.concurrency for load in loads), max(load.prompt + load.new for load in loads)


Ask = Callable[[int, list[list[int]]], "Side"]


def _anew(load: Load, size: int, run: Callable[[int, list[list[int]]], Side]) -> Side:
    """A side whose runs have new prompts each: the first of every side the same, the second, and so on."""
    runs = itertools.count()

    async def side() -> None:
        number = next(runs)
        drawn = np.random.default_rng(number).integers(1, size, (load.requests, load.prompt))
        await run(number, drawn.tolist())()

    return side


def _asked(policy: RunningPolicy, load: Load, run: int, prompts: list[list[int]]) -> Side:
    async def ask(number: int) -> None:
        session = f"{run}-{number}"
        done = await policy.generate(prompts[number], Sampling(load.new, seed=number), session=session)
        if len(done.token_ids) != load.new:
            raise EngineError(f"{len(done.token_ids)} tokens came where {load.new} were asked for.")
        await policy.close_session(session)

    return lambda: at_once(ask, load.requests, load.concurrency)


def _generated(network: PreTrainedModel, load: Load, run: int, prompts: list[list[int]]) -> Side:
    del run
    generate = cast("Callable[..., torch.Tensor]", network.generate)

    async def side() -> None:
        for start in range(0, len(prompts), load.concurrency):
            ids = torch.tensor(prompts[start : start + load.concurrency])
            with torch.inference_mode():
                generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=load.new,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=0,
                    eos_token_id=None,
                )

    return side
