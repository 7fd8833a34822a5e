"""`python -m benchmarks engines`: its sections, run in order, and a description of the machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from agentrl.types import JSON
from benchmarks.engines import client, embedded, killed, throughput, turns, weights
from benchmarks.engines.context import EngineContext
from benchmarks.engines.settings import SETTINGS, EngineSettings
from benchmarks.machine import machine
from benchmarks.sections import ResultRow, as_json, chosen, one_thread, reported

SECTIONS: Mapping[str, Callable[[EngineContext], Awaitable[list[ResultRow]]]] = {
    "embedded": embedded.bench,
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

    python: the interpreter that SGLang is installed for, which all sections but `embedded` need. only: names
    of sections; none = all. on_event: called with a message for each step, and with each line of the summary.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: of runs and machine.

    Raises:
        UserError: no such section, or the interpreter has no SGLang.
        EngineError: a server did not start, or failed.
    """
    names = chosen(only, SECTIONS)
    with one_thread(), tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        return asyncio.run(_bench(EngineContext(python.absolute(), Path(folder), settings, on_event), names))


async def _bench(context: EngineContext, names: Sequence[str]) -> dict[str, JSON]:
    sglang = {} if names == ["embedded"] else await context.versions()
    rows, seconds = [], dict[str, JSON]()
    for number, name in enumerate(names, 1):
        context.on_event(f"{name} ({number} of {len(names)})")
        began = time.monotonic()
        rows += [(name, row) for row in await SECTIONS[name](context)]
        seconds[name] = time.monotonic() - began
    return {
        **reported(rows),
        "settings": {
            **as_json(asdict(context.settings)),
            "sections": [*names],
            "seconds": seconds,
            "threads": 1,
            "warm_up": "one run of each side per row",
            "tiny model": "Qwen3, 0.66M parameters, float32",
            "baseline of embedded": embedded.BASELINE,
            "machine": {**machine(), "httpx2": version("httpx2"), "uvicorn": version("uvicorn")},
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "sglang": sglang,
        },
    }
