"""All sections of the benchmark of Ray, on one Ray of one machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.cluster.config import ClusterConfig
from agentrl.cluster.placement import RankNeeds, layout_of
from agentrl.cluster.ray.placement import placed
from agentrl.cluster.ray.session import connected
from agentrl.errors import ConfigError
from agentrl.types import JSON
from benchmarks.cluster.calls import LOCAL, hand_off, step_overhead
from benchmarks.cluster.context import Cluster, RayBench, Section
from benchmarks.cluster.publish import publish
from benchmarks.machine import machine

SECTIONS: Mapping[str, Section] = {
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
        ConfigError: there is no section with such a name.
    """
    if unknown := [name for name in only if name not in SECTIONS]:
        raise ConfigError(f"there is no section `{unknown[0]}`; choose from {', '.join(SECTIONS)}.")
    return asyncio.run(_bench(bench or RayBench(), only or list(SECTIONS)))


async def _bench(bench: RayBench, names: Sequence[str]) -> dict[str, JSON]:
    summary: dict[str, JSON] = {}
    sections: dict[str, JSON] = {}
    with TemporaryDirectory(prefix="agentrl-bench-") as temporary, _cluster(Path(temporary)) as cluster:
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


@contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    with connected(ClusterConfig(cluster="ray"), folder, os.environ) as session:
        placement = placed(session, layout_of(RankNeeds(1, 1, 0.5, 0), (), colocate=False), 60.0)
        try:
            yield Cluster(session, placement, folder)
        finally:
            placement.remove()


def _settings(bench: RayBench) -> dict[str, JSON]:
    named = {field.name: getattr(bench, field.name) for field in fields(bench)}
    return {**named, "model": bench.model.__name__}
