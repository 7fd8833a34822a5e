"""`python -m benchmarks megatron`: its sections, run in order, and a description of the machine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from agentrl.runtime.extras import require
from agentrl.types import JSON
from benchmarks.machine import machine
from benchmarks.megatron import publish, step
from benchmarks.megatron.context import TWO_RANK_LAYOUTS, MegatronContext
from benchmarks.megatron.settings import SETTINGS, MegatronSettings
from benchmarks.sections import ResultRow, chosen, one_thread, reported

SECTIONS: Mapping[str, Callable[[MegatronContext], Awaitable[list[ResultRow]]]] = {
    "step": step.bench,
    "publish": publish.bench,
    "layouts": step.bench_layouts,
}


def bench_megatron(
    *,
    only: Sequence[str] = (),
    settings: MegatronSettings = SETTINGS,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Run the sections; every rank that they start is stopped at the end.

    only: names of sections; none = all. on_event: called with each line of the summary.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: of runs and machine.

    Raises:
        UserError: no such section, or Megatron-Core is not installed.
    """
    require("this benchmark", "megatron")
    names = chosen(only, SECTIONS)
    with one_thread(), tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        return asyncio.run(_bench(MegatronContext(Path(folder), settings, on_event), names))


async def _bench(context: MegatronContext, names: Sequence[str]) -> dict[str, JSON]:
    rows = [(name, row) for name in names for row in await SECTIONS[name](context)]
    settings = context.settings
    return {
        **reported(rows),
        "settings": {
            "sections": [*names],
            "repeats": settings.repeats,
            "threads": 1,
            "warm_up": "one run of each side per row",
            "workloads": [{**asdict(load), "lengths": [*load.lengths]} for load in settings.workloads],
            "models": {"step": settings.trained.__name__, "publish": settings.published.__name__},
            "row_tokens": settings.row_tokens,
            "layout_row_tokens": settings.layout_row_tokens,
            "layouts": {name: {**sizes} for name, sizes in TWO_RANK_LAYOUTS.items()},
            "loss": "PolicyLoss(), AdamW, fp32",
            "machine": {**machine(), "megatron-core": version("megatron-core")},
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
    }
