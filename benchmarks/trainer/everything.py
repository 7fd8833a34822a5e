"""`python -m benchmarks trainer`: its sections, run in order, and a description of the machine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import torch

from agentrl.types import JSON
from benchmarks.machine import interpreter_versions, machine
from benchmarks.sections import ResultRow, chosen, reported
from benchmarks.trainer.beside_trl import bench_ragged, bench_step
from benchmarks.trainer.context import TrainerContext
from benchmarks.trainer.memory import bench_memory
from benchmarks.trainer.rows import bench_bare, bench_packed
from benchmarks.trainer.settings import TrainerBench
from benchmarks.trainer.tool_calls import bench_success, bench_tools

SECTIONS: Mapping[str, Callable[[TrainerContext], Awaitable[list[ResultRow]]]] = {
    "memory": bench_memory,
    "packed": bench_packed,
    "bare": bench_bare,
    "step": bench_step,
    "ragged": bench_ragged,
    "tools": bench_tools,
    "success": bench_success,
}
_OF_TRL = ("step", "ragged", "tools", "success")


def bench_trainer(
    trl: Path | None,
    *,
    only: Sequence[str] = (),
    bench: TrainerBench | None = None,
    on_event: Callable[[str], None] = print,
) -> dict[str, JSON]:
    """Run the sections.

    trl: the interpreter that TRL is installed for; None = those without it. only: names of sections; none =
    all. on_event: called with each line of the summary.

    Returns:
        summary: one line per row. rows: every repeat, medians and spreads. settings: of sides and machine.

    Raises:
        UserError: no such section; the interpreter has no TRL.
    """
    names = chosen(only, SECTIONS)
    if trl is None and not only:
        names = [name for name in names if name not in _OF_TRL]
    before = torch.get_num_threads()
    bench = bench or TrainerBench()
    torch.set_num_threads(bench.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            return asyncio.run(_bench(TrainerContext(Path(folder), bench, trl, on_event), names))
    finally:
        torch.set_num_threads(before)


async def _bench(context: TrainerContext, names: Sequence[str]) -> dict[str, JSON]:
    versions: dict[str, JSON] = {}
    if context.trl is not None:
        packages = ("trl", "torch", "transformers", "accelerate")
        versions = await interpreter_versions(context.trl, "TRL", packages, "install trl==1.16.0 for it")
    rows = [(name, row) for name in names for row in await SECTIONS[name](context)]
    return {
        **reported(rows),
        "settings": {
            "sections": [*names],
            **context.bench.facts,
            "dtype": "float32",
            "warm_up": "one step of each side per row",
            "machine": machine(),
            "trl": versions,
        },
    }
