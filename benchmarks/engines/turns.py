"""What sticky sessions are worth: conversations on two SGLang servers behind the router.

A session that keeps its key meets the server that has seen its earlier turns; with a new key for every turn
the router sends it to either. All sessions play at once, each turn with new tokens of the world. One server
could not keep the caches of all sessions, two can. Before each run the servers forget everything.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.protocols import Sampling
from agentrl.types import JSON
from benchmarks.compare import Side, rates
from benchmarks.engine import tiny_model
from benchmarks.engines.place import Place, Row, at_once, listed, save, seeded, vocab_size
from benchmarks.engines.settings import Turns

STICKY, NEW = "sticky", "a new key for every turn"


async def bench(place: Place) -> list[Row]:
    """One row, over two servers and a router that are started for it."""
    work = place.settings.turns
    folder = save(seeded(tiny_model), place.folder / "turns" / "model")
    async with place.sglang(folder, count=2, max_total_tokens=work.cache) as servers:
        return await measured(servers.url, [server.url for server in servers.servers], place)


async def measured(url: str, servers: Sequence[str], place: Place) -> list[Row]:
    """url: where requests go. servers: the addresses of all servers behind it."""
    work = place.settings.turns
    policy = SGLangPolicy(url, max_concurrency=work.sessions)
    controls = [Server(server) for server in servers]
    shares: dict[str, list[float]] = {STICKY: [], NEW: []}
    runs = itertools.count()

    def side(name: str) -> Side:
        async def run() -> None:
            for control in controls:
                await control.flush()
            before = policy.counts.copy()
            await _played(policy, work, next(runs), keeps=name == STICKY)
            prompts = policy.counts["prompt_tokens"] - before["prompt_tokens"]
            shares[name].append((policy.counts["cached_tokens"] - before["cached_tokens"]) / prompts)

        return run

    try:
        amount = work.sessions * work.turns
        sides = {name: side(name) for name in shares}
        found = await rates(sides, amount, "turns_per_s", repeats=work.repeats)
    finally:
        await policy.close()
        for control in controls:
            await control.close()
    # The first run of each was the warm-up.
    cached = {name: of[1:] for name, of in shares.items()}
    medians = {name: statistics.median(of) for name, of in cached.items()}
    line = ", ".join(
        f"{name}: {medians[name]:.0%} of the prompts cached, {found.medians[name]:.0f} turns/s"
        for name in shares
    )
    row = Row("turns on two servers", line, {"sides": found.told, "cached": _told(cached, medians)})
    place.on_event(f"{row.name}: {row.line}")
    return [row]


async def _played(policy: SGLangPolicy, work: Turns, run: int, *, keeps: bool) -> None:
    """All sessions to their end. keeps: each has one key, and not a new one for every turn."""
    size = vocab_size(seeded(tiny_model))
    world = np.random.default_rng(0).integers(1, size, (work.sessions, work.turns, work.world)).tolist()

    async def play(number: int) -> None:
        prefix: list[int] = []
        for turn in range(work.turns):
            prefix += world[number][turn]
            key = f"{run}-{number}" if keeps else f"{run}-{number}-{turn}"
            done = await policy.generate(prefix, Sampling(work.new), session=key)
            prefix += done.token_ids.tolist()

    await at_once(play, work.sessions, work.sessions)


def _told(cached: dict[str, list[float]], medians: dict[str, float]) -> dict[str, JSON]:
    return {name: {"shares": listed(of), "median": medians[name]} for name, of in cached.items()}
