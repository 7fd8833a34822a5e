"""What it costs to publish: seconds into the embedded engine, against one copy of the same bytes.

Timed is a whole publish: gathering from the ranks, checksums, buckets, loading beside the weights that serve,
reading back what was loaded, the swap. The torch trainer does the same without processes. The copy is
numpy's, tensor by tensor, into memory that has been touched before. Weights are on the CPU, also where there
are GPUs: the ranks do not see them.
"""

from __future__ import annotations

import itertools
import statistics

import numpy as np

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.protocols import Trainer, WeightSink
from agentrl.types import JSON
from agentrl.weights import named_weights
from agentrl.weights.codec import bytes_of
from benchmarks.compare import Side, timed
from benchmarks.engines.place import Row, listed, seeded, spread
from benchmarks.megatron.place import PAIRS, Place, Work, plain
from benchmarks.megatron.settings import PUBLISH_TARGET

_COPY, _TORCH, _MEGATRON = "copy", "torch", "megatron"


async def bench(place: Place) -> list[Row]:
    """A row for one rank, and one for two that share every matrix."""
    settings, rows = place.settings, list[Row]()
    engine = EmbeddedEngine.from_model(seeded(settings.published), max_slots=1, max_context_len=16)
    work = Work("published", settings.published, settings.row_tokens)
    alone = plain(work)
    copying, num_bytes = _copying(place)
    for name, ranks, sizes in (("one rank", 1, {}), ("TP2", 2, PAIRS["TP2"])):
        with place.spread(work, ranks=ranks, **sizes) as trainer:
            sides = {
                _MEGATRON: _publishing(trainer, engine.sink),
                _TORCH: _publishing(alone, engine.sink),
                _COPY: copying,
            }
            rows.append(await _row(f"publish, {name}", sides, num_bytes, place))
    await engine.close()
    return rows


async def _row(name: str, sides: dict[str, Side], num_bytes: int, place: Place) -> Row:
    spent = await timed(sides, repeats=place.settings.repeats)
    seconds = {side: [one.wall_s for one in of] for side, of in spent.items()}
    medians = {side: statistics.median(of) for side, of in seconds.items()}
    to_copy, to_torch = (medians[_MEGATRON] / medians[side] for side in (_COPY, _TORCH))
    line = (
        f"{medians[_MEGATRON]:.2f} s for {num_bytes / 1e6:.0f} MB, {to_copy:.1f}x a copy "
        f"({medians[_COPY]:.3f} s), {to_torch:.2f}x the torch trainer, target {PUBLISH_TARGET}x a copy"
    )
    place.on_event(f"{name}: {line}")
    told: dict[str, JSON] = {
        side: {"seconds": listed(of), "median": medians[side], "spread": spread(of, medians[side])}
        for side, of in seconds.items()
    }
    figures: dict[str, JSON] = {"ratio_to_copy": to_copy, "ratio_to_torch": to_torch, "num_bytes": num_bytes}
    return Row(name, line, {"device": "cpu", **figures, "target": PUBLISH_TARGET, "sides": told})


def _publishing(trainer: Trainer, sink: WeightSink) -> Side:
    versions = itertools.count(1)

    async def publish() -> None:
        await trainer.publish(sink, version=next(versions))

    return publish


def _copying(place: Place) -> tuple[Side, int]:
    """The copy, and how many bytes it moves."""
    arrays = [bytes_of(tensor) for _, tensor in named_weights(seeded(place.settings.published))]
    rooms = [np.zeros_like(array) for array in arrays]

    async def copy() -> None:
        for room, array in zip(rooms, arrays, strict=True):
            np.copyto(room, array)

    return copy, sum(array.nbytes for array in arrays)
