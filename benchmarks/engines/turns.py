"""The effect of sticky sessions: conversations on two SGLang servers behind the router.

A session with one key is routed to the server that has its earlier turns in its cache; with a new key for
every turn it is routed to either. All sessions run concurrently, each turn with new tokens of the world. One
server cannot cache all sessions, two can. Before each run the caches are flushed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from agentrl.engine.served.config import control_headers
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.types import JSON
from agentrl.types.seams import Sampling
from benchmarks.compare import Side, rates
from benchmarks.engines.context import EngineContext, at_once
from benchmarks.engines.settings import SessionLoad
from benchmarks.models import save, seeded, tiny_model, vocab_size
from benchmarks.sections import ResultRow

STICKY, NEW = "sticky", "a new key for every turn"


async def bench(context: EngineContext) -> list[ResultRow]:
    """One row, over two servers and a router that are started for it."""
    load = context.settings.turns
    folder = save(seeded(tiny_model), context.folder / "turns" / "model")
    async with context.sglang(folder, count=2, max_total_tokens=load.cache) as servers:
        return await measured(servers.url, [server.url for server in servers.servers], context)


async def measured(url: str, servers: Sequence[str], context: EngineContext) -> list[ResultRow]:
    """The row of a router. url: of the router. servers: the addresses of the servers behind it."""
    load = context.settings.turns
    policy = SGLangPolicy(url, max_concurrency=load.sessions)
    controls = [Server(server, control_headers()) for server in servers]
    shares: dict[str, list[float]] = {STICKY: [], NEW: []}
    runs = itertools.count()

    def side(name: str) -> Side:
        async def run() -> None:
            for control in controls:
                await control.flush()
            before = policy.counts.copy()
            await _play(policy, load, next(runs), sticky=name == STICKY)
            prompts = policy.counts["prompt_tokens"] - before["prompt_tokens"]
            shares[name].append((policy.counts["cached_tokens"] - before["cached_tokens"]) / prompts)

        return run

    try:
        amount = load.sessions * load.turns
        sides = {name: side(name) for name in shares}
        result = await rates(sides, amount, "turns_per_s", repeats=load.repeats)
    finally:
        await policy.close()
        for control in controls:
            await control.close()
    # The first run of each was the warm-up.
    cached = {name: values[1:] for name, values in shares.items()}
    medians = {name: statistics.median(values) for name, values in cached.items()}
    line = ", ".join(
        f"{name}: {medians[name]:.0%} of the prompts cached, {result.medians[name]:.0f} turns/s"
        for name in shares
    )
    row = ResultRow(
        "turns on two servers", line, {"sides": result.figures, "cached": _cache_figures(cached, medians)}
    )
    context.on_event(f"{row.name}: {row.line}")
    return [row]


async def _play(policy: SGLangPolicy, load: SessionLoad, run: int, *, sticky: bool) -> None:
    """Play all sessions. sticky: each has one key, instead of a new one for every turn."""
    size = vocab_size(seeded(tiny_model))
    world = np.random.default_rng(0).integers(1, size, (load.sessions, load.turns, load.world)).tolist()

    async def play(number: int) -> None:
        prefix: list[int] = []
        for turn in range(load.turns):
            prefix += world[number][turn]
            key = f"{run}-{number}" if sticky else f"{run}-{number}-{turn}"
            completion = await policy.generate(prefix, Sampling(load.new), session=key)
            prefix += completion.token_ids.tolist()

    await at_once(play, load.sessions, load.sessions)


def _cache_figures(cached: dict[str, list[float]], medians: dict[str, float]) -> dict[str, JSON]:
    return {name: {"shares": [*values], "median": medians[name]} for name, values in cached.items()}
