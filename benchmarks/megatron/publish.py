"""The cost of publishing: seconds into the embedded engine, against one copy of the same bytes.

The time of a complete publish is measured: gathering from the ranks, checksums, buckets, staging next to the
served weights, reading back, the swap. The torch trainer does the same without processes. The copy is
numpy's, tensor by tensor, into memory that is already mapped. Weights are on the CPU, also where there are
GPUs: these are hidden from the ranks.
"""

from __future__ import annotations

import itertools

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.types import JSON
from agentrl.types.seams import Trainer, WeightSink
from agentrl.weights.codec import bytes_of, named_weights
from benchmarks.compare import Side, copying, seconds_of, timed
from benchmarks.megatron.context import TWO_RANK_LAYOUTS, MegatronContext, TrainerSetup, torch_trainer
from benchmarks.megatron.settings import PUBLISH_TARGET
from benchmarks.models import seeded
from benchmarks.sections import ResultRow

_COPY, _TORCH, _MEGATRON = "copy", "torch", "megatron"


async def bench(context: MegatronContext) -> list[ResultRow]:
    """A row for one rank, and one for two that share every matrix."""
    settings, rows = context.settings, list[ResultRow]()
    engine = EmbeddedEngine.from_model(seeded(settings.published), max_slots=1, max_context_len=16)
    setup = TrainerSetup("published", settings.published, settings.row_tokens)
    baseline = torch_trainer(setup)
    arrays = [bytes_of(tensor) for _, tensor in named_weights(seeded(settings.published))]
    num_bytes = sum(array.nbytes for array in arrays)
    for name, ranks, sizes in (("one rank", 1, {}), ("TP2", 2, TWO_RANK_LAYOUTS["TP2"])):
        with context.megatron_trainer(setup, ranks=ranks, **sizes) as trainer:
            sides = {
                _MEGATRON: _publishing(trainer, engine.sink),
                _TORCH: _publishing(baseline, engine.sink),
                _COPY: copying(arrays),
            }
            rows.append(await _row(f"publish, {name}", sides, num_bytes, context))
    await engine.close()
    return rows


async def _row(name: str, sides: dict[str, Side], num_bytes: int, context: MegatronContext) -> ResultRow:
    spent = await timed(sides, repeats=context.settings.repeats)
    medians, by_side = seconds_of(spent)
    to_copy, to_torch = (medians[_MEGATRON] / medians[side] for side in (_COPY, _TORCH))
    line = (
        f"{medians[_MEGATRON]:.2f} s for {num_bytes / 1e6:.0f} MB, {to_copy:.1f}x a copy "
        f"({medians[_COPY]:.3f} s), {to_torch:.2f}x the torch trainer, target {PUBLISH_TARGET}x a copy"
    )
    context.on_event(f"{name}: {line}")
    figures: dict[str, JSON] = {"ratio_to_copy": to_copy, "ratio_to_torch": to_torch, "num_bytes": num_bytes}
    return ResultRow(name, line, {"device": "cpu", **figures, "target": PUBLISH_TARGET, "sides": by_side})


def _publishing(trainer: Trainer, sink: WeightSink) -> Side:
    versions = itertools.count(1)

    async def publish() -> None:
        await trainer.publish(sink, version=next(versions))

    return publish
