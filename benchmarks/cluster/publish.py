"""A section of the benchmark of Ray: new weights from a rank to servers that only take them.

Every server is a process that copies the bytes into its memory, once. `tensor` goes through shared memory,
`distributed` through a process group on the loopback device; with `driver` the buckets pass through this
process, as they do for a sink that takes no snapshots. A copy is numpy's, of the same bytes, tensor by
tensor, into memory that is already mapped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports import Transport
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.losses import PolicyLoss
from agentrl.processes.child import Child
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.types import JSON
from agentrl.types.seams import WeightSink
from agentrl.weights.codec import bytes_of, named_weights
from benchmarks.cluster.context import Cluster, RayBench
from benchmarks.compare import Side, copying, figures_of, timed
from benchmarks.engines.context import hold_nothing, lost
from benchmarks.models import save, seeded

_COPY = "copy"
_POLL_S = 0.05
_CLEAR_PEAK = "5"


class Way(NamedTuple):
    """A side: the transport, and the number of servers."""

    transport: str
    servers: int

    @property
    def name(self) -> str:
        """Of the side."""
        return f"{self.transport}_{self.servers}"


WAYS = (Way("tensor", 1), Way("tensor", 4), Way("distributed", 1), Way("distributed", 4), Way("driver", 1))


async def publish(cluster: Cluster, bench: RayBench) -> Mapping[str, JSON]:
    """How long a whole publish takes by each way, and how much more memory this process has at its peak."""
    network = seeded(bench.model)
    model = save(network, cluster.folder / "model")
    arrays = [bytes_of(tensor) for _, tensor in named_weights(network)]
    grown: dict[str, list[int]] = {way.name: [] for way in WAYS}
    ranks = Processes(1, cluster.folder / "ranks", preloaded=WORKER, places=cluster.places)
    try:
        plan = TorchPlan(policy=Learning(PolicyLoss(), TrainerConfig(), 1), models={"old": str(model)})
        trainer = await RankTrainer.started(ranks, plan)
        async with AsyncExitStack() as stack:
            sides: dict[str, Side] = {_COPY: copying(arrays)}
            for way in WAYS:
                sink = await stack.enter_async_context(_sink(way, cluster.folder))
                sides[way.name] = _publishing(trainer, sink, grown[way.name])
            # A stream through the driver leaves the rank with memory for three buckets: in turns with it, the
            # next snapshot would have to allocate the rest.
            by_driver = {way.name: sides.pop(way.name) for way in WAYS if way.transport == "driver"}
            spent = await timed(sides, repeats=bench.repeats)
            spent |= await timed(by_driver, repeats=bench.repeats)
    finally:
        ranks.close()
    seconds = {name: figures_of([run.wall_s for run in runs]) for name, runs in spent.items()}
    medians = {name: side.median for name, side in seconds.items()}
    return {
        "summary": {
            "published_mb": sum(array.nbytes for array in arrays) / 1e6,
            **{f"publish_{name}_in_copies": medians[name] / medians[_COPY] for name in grown},
            **{
                f"publish_{transport}_four_over_one": medians[f"{transport}_4"] / medians[f"{transport}_1"]
                for transport in ("tensor", "distributed")
            },
            **{f"driver_grows_by_mb_{name}": max(sizes) / 1e6 for name, sizes in grown.items()},
        },
        "seconds": {name: side._asdict() for name, side in seconds.items()},
    }


def _publishing(trainer: RankTrainer, sink: WeightSink, grown: list[int]) -> Side:
    versions = itertools.count(1)

    async def run() -> None:
        before = _reset_peak()
        await trainer.publish(sink, version=next(versions))
        grown.append(_memory("VmHWM") - before)

    return run


@asynccontextmanager
async def _sink(way: Way, folder: Path) -> AsyncIterator[WeightSink]:
    """The sink of a side, over servers of its own."""
    logs = [folder / f"{way.name}-{number}.log" for number in range(way.servers)]
    children = [Child("benchmarks.cluster.receiver", (), log) for log in logs]
    try:
        servers = [Server(f"http://127.0.0.1:{child.pipe.recv()}") for child in children]
        for server in servers:
            while not await server.healthy(1.0):
                await asyncio.sleep(_POLL_S)
        is_group = way.transport == "distributed"
        transport: Transport = Distributed(check_loaded=False) if is_group else SharedMemory()
        sink = SGLangSink(transport, lambda: servers, hold_nothing, lost)
        yield _Bucketwise(sink) if way.transport == "driver" else sink
        await sink.close()
        for server in servers:
            await server.close()
    finally:
        for child in children:
            child.kill()


class _Bucketwise:
    """A sink without snapshots: all buckets pass through this process."""

    def __init__(self, sink: SGLangSink) -> None:
        self.begin = sink.begin


def _reset_peak() -> int:
    """Begin a new peak of this process's memory; what it has now (bytes)."""
    Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    return _memory("VmRSS")


def _memory(field: str) -> int:
    """A field of /proc/self/status (bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
