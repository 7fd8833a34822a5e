"""All sections of the benchmark of Ray, on one Ray of one machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.types import JSON
from benchmarks.cluster.calls import LOCAL, hand_off, step_overhead
from benchmarks.cluster.context import Cluster, RayBench, Section
from benchmarks.cluster.node import node
from benchmarks.cluster.publish import publish
from benchmarks.machine import machine
from benchmarks.sections import chosen

SECTIONS: Mapping[str, Section] = {
    # Before the Ray of the others runs.
    "node": node,
    "step_overhead": step_overhead,
    "hand_off": hand_off,
    "publish": publish,
}
"""The sections by name; their summaries are joined."""


def bench_ray(bench: RayBench | None = None, *, only: Sequence[str] = ()) -> dict[str, JSON]:
    """All sections, or those with these names.

    Returns:
        summary: of all sections. Each section by its name, with its repeats. settings: of runs and machine.

    Raises:
        UserError: there is no section with such a name.
    """
    return asyncio.run(_bench(bench or RayBench(), chosen(only, SECTIONS)))


async def _bench(bench: RayBench, names: Sequence[str]) -> dict[str, JSON]:
    summary: dict[str, JSON] = {}
    sections: dict[str, JSON] = {}
    with TemporaryDirectory(prefix="agentrl-bench-") as temporary, ExitStack() as stack:
        cluster = Cluster(Path(temporary), stack)
        for name in names:
            measured = dict(await SECTIONS[name](cluster, bench))
            found = measured.pop("summary")
            assert isinstance(found, dict), "every section has a summary"
            summary |= found
            sections[name] = measured
    load = os.getloadavg()[0]
    return {
        "summary": {**summary, "load_average": load},
        **sections,
        "settings": {**_settings(bench), "ray": version("ray"), "baseline": LOCAL, **machine()},
    }


def _settings(bench: RayBench) -> dict[str, JSON]:
    named = {field.name: getattr(bench, field.name) for field in fields(bench)}
    return {**named, "model": bench.model.__name__}
