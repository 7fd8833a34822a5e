"""The cost of an update of weights: seconds through the sink, by transport, against one copy of the bytes.

One SGLang server on the CPU, with the dtype of the weights. Two versions alternate that differ in the lowest
bit of some values, so that a delta is not empty. The time of the complete update is measured: checksums of
the staged weights, pause, transfer, loading, reading back, resume. The copy is numpy's, bucket by
bucket, into memory that is already mapped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.types.seams import Bucket
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import named_weights, pack_buckets, torch_dtype
from benchmarks.compare import Side, copying, seconds_of, timed
from benchmarks.engines.context import EngineContext, hold_nothing, lost
from benchmarks.models import save, seeded, small_model
from benchmarks.sections import ResultRow

UPDATE, COPY = "update", "copy"
_NO_FULL_UPDATE = 1000
_WORDS: Mapping[int, type[np.uint16 | np.uint32]] = {2: np.uint16, 4: np.uint32}


class Version(NamedTuple):
    """A version of the weights, in buckets."""

    buckets: Sequence[Bucket]
    checksum: int

    @property
    def num_bytes(self) -> int:
        """The size of all buckets."""
        return sum(bucket.data.nbytes for bucket in self.buckets)


async def bench(context: EngineContext) -> list[ResultRow]:
    """A row for each dtype and transport, over a server that is started for each dtype."""
    work, rows = context.settings.weights, list[ResultRow]()
    for dtype in work.dtypes:
        network = seeded(small_model, torch_dtype(dtype))
        folder = save(network, context.folder / f"weights-{dtype}" / "model")
        by_name = transports(work.transports, folder)
        async with context.sglang(folder, dtype=dtype) as servers:
            rows += await measured(dtype, servers.url, versions(network, context), by_name, context)
    return rows


def transports(names: Sequence[str], model: Path) -> dict[str, Transport]:
    """The transports by their names in a run's configuration."""
    folder = model.parent
    by_name: dict[str, Transport] = {
        "tensor": SharedMemory(),
        "distributed": Distributed(),
        "disk": Disk(folder / "disk", model=model),
        "delta": Disk(
            folder / "delta", model=model, full_every=_NO_FULL_UPDATE, mirror=folder / "delta-mirror"
        ),
    }
    return {name: by_name[name] for name in names}


def versions(network: PreTrainedModel, context: EngineContext) -> tuple[Version, Version]:
    """The model's own weights, and a version that differs from them in a share of the values."""
    work = context.settings.weights
    buckets = list(pack_buckets(named_weights(network), work.bucket_bytes))
    rng = np.random.default_rng(0)
    changed = [Bucket(bucket.tensors, _changed(bucket, work.changed, rng)) for bucket in buckets]
    first, second = (Version(version, sum_digests(_digests(version))) for version in (buckets, changed))
    return first, second


async def measured(
    model: str,
    url: str,
    both: tuple[Version, Version],
    by_name: Mapping[str, Transport],
    context: EngineContext,
) -> list[ResultRow]:
    """A row for each transport to the server at this address."""
    rows = []
    for name, transport in by_name.items():
        server = Server(url)
        try:
            row = await _row(f"weights, {model}, {name}", server, both, transport, context)
        finally:
            await server.close()
        rows.append(row)
        context.on_event(f"{row.name}: {row.line}")
    return rows


async def _row(
    name: str, server: Server, both: tuple[Version, Version], transport: Transport, context: EngineContext
) -> ResultRow:
    sink = SGLangSink(transport, lambda: [server], hold_nothing, lost)
    try:
        sides = {UPDATE: _updating(sink, both), COPY: copying([bucket.data for bucket in both[0].buckets])}
        spent = await timed(sides, repeats=context.settings.repeats)
    finally:
        await sink.close()
    medians, figures = seconds_of(spent)
    ratio, size = medians[UPDATE] / medians[COPY], both[0].num_bytes
    line = f"{medians[UPDATE]:.2f} s for {size / 1e6:.0f} MB, {ratio:.0f}x a copy ({medians[COPY]:.3f} s)"
    return ResultRow(name, line, {"ratio": ratio, "num_bytes": size, "sides": figures})


def _updating(sink: SGLangSink, both: tuple[Version, Version]) -> Side:
    numbers = itertools.count(1)

    async def update() -> None:
        number = next(numbers)
        version = both[number % 2]
        manifest = [spec for bucket in version.buckets for spec in bucket.tensors]
        async with sink.begin(manifest, number) as transaction:
            for bucket in version.buckets:
                await transaction.put(bucket)
            await transaction.commit(version.checksum)

    return update


def _changed(bucket: Bucket, share: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The bytes of a bucket of one dtype, with the lowest bit of a share of its values flipped."""
    data = bucket.data.copy()
    words = data.view(_WORDS[torch_dtype(bucket.tensors[0].dtype).itemsize])
    np.bitwise_xor(words, 1, out=words, where=rng.random(words.size) < share)
    return data


def _digests(buckets: Sequence[Bucket]) -> Iterator[int]:
    for bucket in buckets:
        yield from digests_of(bucket)
