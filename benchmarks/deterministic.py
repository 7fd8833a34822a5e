"""The cost of deterministic inference: the embedded engine with it, and without it.

Both engines have the same weights, slots and context, and get the same requests. Lengths are forced: no stop,
no end token. One request is there to hurt: with deterministic inference it is computed in a block of many.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import JSON
from benchmarks.compare import Duration, rates_of, timed
from benchmarks.engine import GenerationWorkload, Requests, send_all, tiny_model
from benchmarks.machine import machine

WITHOUT, WITH = "default", "deterministic"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests, and the slots and the context (tokens) of the engines that get them."""

    workload: GenerationWorkload
    slots: int
    context_len: int


LOADS = (
    EngineLoad(GenerationWorkload("32 requests", prompt=(8, 56), new=(16, 112)), 32, 192),
    EngineLoad(
        GenerationWorkload("256 sessions of four turns", concurrency=256, new=(10, 10), turns=4), 256, 192
    ),
    EngineLoad(GenerationWorkload("one request", concurrency=1), 32, 192),
    EngineLoad(GenerationWorkload("32 requests, a long context"), 32, 1024),
)
"""Frozen."""


def bench_deterministic(
    *, loads: tuple[EngineLoad, ...] = LOADS, repeats: int = 5, threads: int = 1
) -> dict[str, JSON]:
    """Tokens per second of both engines for every load, by wall time.

    Returns:
        summary: one line per load with the ratio of medians. rows: all repeats, medians, spread.
        settings: of runs and machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tiny_model().eval()
        rows = {load.workload.name: asyncio.run(_bench_load(model, load, repeats)) for load in loads}
    finally:
        torch.set_num_threads(before)
    return {
        "summary": {name: row["line"] for name, row in rows.items()},
        "rows": dict(rows),
        "settings": {
            "repeats": repeats,
            "threads": threads,
            "loads": [{"slots": load.slots, "context_len": load.context_len} for load in loads],
            "workloads": [
                {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
                for fields in (asdict(load.workload) for load in loads)
            ],
            "machine": machine(),
        },
    }


async def _bench_load(model: PreTrainedModel, load: EngineLoad, repeats: int) -> dict[str, JSON]:
    requests = Requests.draw(load.workload, model.config.vocab_size)
    engines = {
        side: EmbeddedEngine.from_model(
            model,
            max_slots=load.slots,
            max_context_len=load.context_len,
            eos_token_ids=(),
            deterministic=side == WITH,
        )
        for side in (WITHOUT, WITH)
    }
    spent: dict[str, list[Duration]] = await timed(
        {side: partial(send_all, engine, requests) for side, engine in engines.items()}, repeats=repeats
    )
    for engine in engines.values():
        await engine.close()
    rates = rates_of(spent, requests.num_tokens, "tokens_per_s")
    ratio = rates.medians[WITH] / rates.medians[WITHOUT]
    per_s = f"{rates.medians[WITH]:.0f} against {rates.medians[WITHOUT]:.0f} tokens/s"
    return {"line": f"{ratio:.2f}x ({per_s})", "ratio": ratio, "sides": rates.figures}
