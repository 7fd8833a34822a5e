"""What an update of weights costs: seconds through the sink, by transport, against one copy of the bytes.

One SGLang server on the CPU, whose dtype is the weights'. Two versions take turns that differ in the lowest
bit of some values, so that an update as a delta has that much to tell. Timed is a whole update: checksums of
what is staged, pause, transfer, loading, reading back, flush, resume. The copy is numpy's, bucket by bucket,
into memory that has been touched before.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from agentrl.errors import EngineError
from agentrl.protocols import Bucket
from agentrl.types import JSON
from agentrl.weights import named_weights, pack_buckets
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import torch_dtype
from benchmarks.compare import Side, timed
from benchmarks.engine import small_model
from benchmarks.engines.place import Place, Row, listed, save, seeded, spread

UPDATE, COPY = "update", "copy"
_NEVER_FULL_AGAIN = 1000
_WORDS: Mapping[int, type[np.uint16 | np.uint32]] = {2: np.uint16, 4: np.uint32}


class Version(NamedTuple):
    """Weights as they are sent."""

    buckets: Sequence[Bucket]
    checksum: int

    @property
    def num_bytes(self) -> int:
        """What there is to send."""
        return sum(bucket.data.nbytes for bucket in self.buckets)


async def bench(place: Place) -> list[Row]:
    """A row for each dtype and transport, over a server that is started for each dtype."""
    work, rows = place.settings.weights, list[Row]()
    for dtype in work.dtypes:
        network = seeded(small_model, torch_dtype(dtype))
        folder = save(network, place.folder / f"weights-{dtype}" / "model")
        ways = transports(work.transports, folder)
        async with place.sglang(folder, dtype=dtype) as servers:
            rows += await measured(dtype, servers.url, versions(network, place), ways, place)
    return rows


def transports(names: Sequence[str], model: Path) -> dict[str, Transport]:
    """The ways of weights by the names that a run's configuration has for them."""
    written = model.parent
    known: dict[str, Transport] = {
        "tensor": SharedMemory(),
        "distributed": Distributed(),
        "disk": Disk(written / "disk", model=model),
        "delta": Disk(
            written / "delta", model=model, full_every=_NEVER_FULL_AGAIN, mirror=written / "delta-whole"
        ),
    }
    return {name: known[name] for name in names}


def versions(network: PreTrainedModel, place: Place) -> tuple[Version, Version]:
    """The model's own weights, and others that differ from them in as many values as the settings say."""
    work = place.settings.weights
    buckets = list(pack_buckets(named_weights(network), work.bucket_bytes))
    rng = np.random.default_rng(0)
    changed = [Bucket(one.tensors, _changed(one, work.changed, rng)) for one in buckets]
    first, second = (Version(of, sum_digests(_digests(of))) for of in (buckets, changed))
    return first, second


async def measured(
    model: str,
    url: str,
    both: tuple[Version, Version],
    ways: Mapping[str, Transport],
    place: Place,
) -> list[Row]:
    """A row for each way into the server at this address."""
    rows = []
    for name, transport in ways.items():
        server = Server(url)
        try:
            row = await _row(f"weights, {model}, {name}", server, both, transport, place)
        finally:
            await server.close()
        rows.append(row)
        place.on_event(f"{row.name}: {row.line}")
    return rows


async def _row(
    name: str, server: Server, both: tuple[Version, Version], transport: Transport, place: Place
) -> Row:
    sink = SGLangSink(transport, lambda: [server], nullcontext, _lost)
    try:
        sides = {UPDATE: _updating(sink, both), COPY: _copying(both[0])}
        spent = await timed(sides, repeats=place.settings.repeats)
    finally:
        await sink.close()
    seconds = {side: [one.wall_s for one in of] for side, of in spent.items()}
    medians = {side: statistics.median(of) for side, of in seconds.items()}
    ratio, size = medians[UPDATE] / medians[COPY], both[0].num_bytes
    line = f"{medians[UPDATE]:.2f} s for {size / 1e6:.0f} MB, {ratio:.0f}x a copy ({medians[COPY]:.3f} s)"
    told: dict[str, JSON] = {
        side: {"seconds": listed(of), "median": medians[side], "spread": spread(of, medians[side])}
        for side, of in seconds.items()
    }
    return Row(name, line, {"ratio": ratio, "num_bytes": size, "sides": told})


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


def _copying(version: Version) -> Side:
    rooms = [np.zeros_like(bucket.data) for bucket in version.buckets]

    async def copy() -> None:
        for room, bucket in zip(rooms, version.buckets, strict=True):
            np.copyto(room, bucket.data)

    return copy


def _lost(server: Server, error: EngineError) -> None:
    # A failed update raises by itself; one that did not resume afterwards would not.
    raise EngineError(f"{server.url} is of no use any more: {error}")


def _changed(bucket: Bucket, share: float, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """The bytes of a bucket of one dtype, with the lowest bit of a share of its values turned."""
    data = bucket.data.copy()
    words = data.view(_WORDS[torch_dtype(bucket.tensors[0].dtype).itemsize])
    np.bitwise_xor(words, 1, out=words, where=rng.random(words.size) < share)
    return data


def _digests(buckets: Sequence[Bucket]) -> Iterator[int]:
    for bucket in buckets:
        yield from digests_of(bucket)
