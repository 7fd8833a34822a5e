"""Two sections of the benchmark of Ray: a call of a trainer's rank, against one in a child process.

The worker of both does nothing, and they take turns in every repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.snapshots import Ranks, called
from agentrl.types import JSON, TrainBatch
from benchmarks.batches import batch_of
from benchmarks.cluster import idle
from benchmarks.cluster.context import Cluster, RayBench
from benchmarks.cluster.idle import IdlePlan, arrays_of
from benchmarks.compare import Duration, figures_of, timed

LOCAL, RAY = "local", "ray"
_VOCAB = 8192


async def step_overhead(cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
    """How long a call with the batch of a step takes, on either side, where the worker does nothing.

    The driver's CPU time, of all its threads, depends less on what else the machine does.
    """
    spent = await _calls(cluster, batch_of([bench.tokens] * bench.episodes, _VOCAB), bench)
    wall = {side: figures_of([1000 * call.wall_s for call in calls]) for side, calls in spent.items()}
    cpu = {side: figures_of([1000 * call.cpu_s for call in calls]) for side, calls in spent.items()}
    return {
        "summary": {
            "step_overhead_ms": wall[RAY].median - wall[LOCAL].median,
            "step_overhead_driver_cpu_ms": cpu[RAY].median - cpu[LOCAL].median,
            **{f"{side}_ms": one.median for side, one in wall.items()},
            **{f"{side}_driver_cpu_ms": one.median for side, one in cpu.items()},
        },
        "ms": {side: one._asdict() for side, one in wall.items()},
        "driver_cpu_ms": {side: one._asdict() for side, one in cpu.items()},
    }


async def hand_off(cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
    """The rate at which the samples of a large batch reach the rank."""
    batch = batch_of([bench.long_tokens] * bench.episodes, _VOCAB)
    gigabytes = sum(array.nbytes for sample in batch.samples for array in arrays_of(sample)) / 1e9
    with _rank(cluster, RAY) as ranks:
        num_arrays = sum(len(arrays_of(sample)) for sample in batch.samples)
        share_of_views = ranks.call(idle.IdleWorker.num_views, batch)[0] / num_arrays
    spent = await _calls(cluster, batch, bench)
    figures = {side: figures_of([gigabytes / call.wall_s for call in calls]) for side, calls in spent.items()}
    return {
        "summary": {
            "hand_off_gb_per_s": figures[RAY].median,
            "local_gb_per_s": figures[LOCAL].median,
            "batch_gb": gigabytes,
            "share_of_arrays_without_a_copy_in_the_rank": share_of_views,
        },
        "gb_per_s": {side: one._asdict() for side, one in figures.items()},
    }


async def _calls(cluster: Cluster, batch: TrainBatch, bench: RayBench) -> dict[str, list[Duration]]:
    """The duration of a call with this batch, by side and repeat."""
    with _rank(cluster, LOCAL) as local, _rank(cluster, RAY) as on_ray:
        sides = {LOCAL: local, RAY: on_ray}

        async def call(ranks: Ranks) -> None:
            await called(ranks, idle.IdleWorker.take, batch)

        return await timed(
            {side: partial(call, ranks) for side, ranks in sides.items()}, repeats=bench.repeats
        )


@contextmanager
def _rank(cluster: Cluster, side: str) -> Iterator[Ranks]:
    folder = cluster.folder / side
    places = None if side == LOCAL else cluster.places
    ranks = Processes(1, folder, preloaded=idle.__name__, places=places)
    try:
        ranks.begin(IdlePlan())
        yield ranks
    finally:
        ranks.close()
