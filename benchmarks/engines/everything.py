"""`python -m benchmarks engines`: its sections, one after the other, and what they ran on."""

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
from benchmarks.engines.place import Place, Row
from benchmarks.engines.settings import SETTINGS, Settings
from benchmarks.machine import machine

SECTIONS: Mapping[str, Callable[[Place], Awaitable[list[Row]]]] = {
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
    settings: Settings = SETTINGS,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Run the sections; every server that they start is gone at the end, and after Ctrl-C.

    python: the interpreter that SGLang is installed for. only: names of sections; none = all.
    on_event: gets a sentence for each step, and each line of the summary as soon as it is known.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: what was run, on what.

    Raises:
        UserError: no such section, or the interpreter has no SGLang.
        EngineError: a server did not come up, or failed.
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
            place = Place(python.absolute(), Path(folder), settings, on_event)
            return asyncio.run(_bench(place, [name for name in SECTIONS if name in only or not only]))
    finally:
        torch.set_num_threads(before)


async def _bench(place: Place, names: Sequence[str]) -> dict[str, JSON]:
    sglang = await place.versions()
    rows, seconds = [], dict[str, JSON]()
    for number, name in enumerate(names, 1):
        place.on_event(f"{name} ({number} of {len(names)})")
        began = time.monotonic()
        rows += [(name, row) for row in await SECTIONS[name](place)]
        seconds[name] = time.monotonic() - began
    return {
        "summary": {row.name: row.line for _, row in rows},
        "rows": [{"section": name, "name": row.name, "line": row.line, **row.figures} for name, row in rows],
        "settings": {
            # Through JSON and back: its tuples are lists then, as a reader of the JSON finds them.
            **cast(dict[str, JSON], json.loads(json.dumps(asdict(place.settings)))),
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
