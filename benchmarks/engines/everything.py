"""`python -m benchmarks engines`: its sections, run in order, and a description of the machine."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch

from agentrl.errors import UserError, did_you_mean
from agentrl.types import JSON
from benchmarks.engines import client, killed, throughput, turns, weights
from benchmarks.engines.context import EngineContext, ResultRow
from benchmarks.engines.settings import SETTINGS, EngineSettings
from benchmarks.machine import machine

SECTIONS: Mapping[str, Callable[[EngineContext], Awaitable[list[ResultRow]]]] = {
    "throughput": throughput.bench,
    "client": client.bench,
    "turns": turns.bench,
    "weights": weights.bench,
    "killed": killed.bench,
}


def bench_engines(
    python: Path,
    *,
    only: Sequence[str] = (),
    settings: EngineSettings = SETTINGS,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Run the sections; every server that they start is stopped at the end, and after Ctrl-C.

    python: the interpreter that SGLang is installed for. only: names of sections; none = all.
    on_event: called with a message for each step, and with each line of the summary.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: of runs and machine.

    Raises:
        UserError: no such section, or the interpreter has no SGLang.
        EngineError: a server did not start, or failed.
    """
    if unknown := [name for name in only if name not in SECTIONS]:
        raise UserError(
            f"There is no section `{unknown[0]}`; there are {', '.join(SECTIONS)}."
            f"{did_you_mean(unknown[0], SECTIONS)}"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            context = EngineContext(python.absolute(), Path(folder), settings, on_event)
            return asyncio.run(_bench(context, [name for name in SECTIONS if name in only or not only]))
    finally:
        torch.set_num_threads(before)


async def _bench(context: EngineContext, names: Sequence[str]) -> dict[str, JSON]:
    sglang = await context.versions()
    rows, seconds = [], dict[str, JSON]()
    for number, name in enumerate(names, 1):
        context.on_event(f"{name} ({number} of {len(names)})")
        began = time.monotonic()
        rows += [(name, row) for row in await SECTIONS[name](context)]
        seconds[name] = time.monotonic() - began
    return {
        "summary": {row.name: row.line for _, row in rows},
        "rows": [{"section": name, "name": row.name, "line": row.line, **row.figures} for name, row in rows],
        "settings": {
            # A round trip through JSON turns tuples into lists, as in the printed JSON.
            **cast(dict[str, JSON], json.loads(json.dumps(asdict(context.settings)))),
            "sections": [*names],
            "seconds": seconds,
            "threads": 1,
            "warm_up": "one run of each side per row",
            "tiny model": "Qwen3, 0.66M parameters, float32",
            "machine": {**machine(), "httpx2": version("httpx2"), "uvicorn": version("uvicorn")},
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "sglang": sglang,
        },
    }
