"""The cost of a step: tokens a second of one rank against the torch trainer, and of two ranks against one.

The time of the complete call is measured: rows, forward and backward passes, clipping, AdamW, and for
Megatron the transfer to its process and back. Both train the same weights on the same batch in every repeat,
with the same loss. Everything runs on the CPU, also where there are GPUs: these are hidden from the ranks.
"""

from __future__ import annotations

from agentrl.types import JSON, TrainBatch
from agentrl.types.seams import Trainer
from benchmarks.batches import batch_of
from benchmarks.compare import Side, rates
from benchmarks.megatron.context import (
    TWO_RANK_LAYOUTS,
    MegatronContext,
    TrainerSetup,
    torch_trainer,
)
from benchmarks.megatron.settings import BatchWorkload
from benchmarks.sections import ResultRow

_ONE_RANK = "one rank"


async def bench(context: MegatronContext) -> list[ResultRow]:
    """A row for an update and one for scoring of every workload."""
    settings, rows = context.settings, list[ResultRow]()
    setup = TrainerSetup("trained", settings.trained, settings.row_tokens)
    baseline = torch_trainer(setup)
    with context.megatron_trainer(setup) as megatron:
        for workload in settings.workloads:
            batch = batch_of(workload.lengths, _vocab(context))
            for label, side in (("update", _updating), ("score", _scoring)):
                sides = {"megatron": side(megatron, batch), "torch": side(baseline, batch)}
                rows.append(await _row(f"{label}, {workload.name}", workload, sides, context))
    return rows


async def bench_layouts(context: MegatronContext) -> list[ResultRow]:
    """A row for each layout of two ranks: the rate of its updates, relative to one rank."""
    settings, rows = context.settings, list[ResultRow]()
    workload = settings.workloads[0]
    batch = batch_of(workload.lengths, _vocab(context))
    setup = TrainerSetup("trained", settings.trained, settings.layout_row_tokens)
    with context.megatron_trainer(setup) as single:
        for name, sizes in TWO_RANK_LAYOUTS.items():
            with context.megatron_trainer(setup, ranks=2, **sizes) as pair:
                sides = {name: _updating(pair, batch), _ONE_RANK: _updating(single, batch)}
                layout = BatchWorkload(f"{name} by one rank", workload.lengths, None)
                rows.append(await _row(f"update, {layout.name}", layout, sides, context))
    return rows


async def _row(
    name: str, workload: BatchWorkload, sides: dict[str, Side], context: MegatronContext
) -> ResultRow:
    first, second = sides
    result = await rates(sides, sum(workload.lengths), "tokens_per_s", repeats=context.settings.repeats)
    ratio = result.medians[first] / result.medians[second]
    line = f"{ratio:.2f}x ({result.medians[first]:.0f} against {result.medians[second]:.0f} tokens/s)"
    if workload.target is not None:
        line += f", target {workload.target}x"
    context.on_event(f"{name}: {line}")
    figures: dict[str, JSON] = {"device": "cpu", "ratio": ratio, "target": workload.target}
    return ResultRow(name, line, {**figures, "sides": result.figures})


def _updating(trainer: Trainer, batch: TrainBatch) -> Side:
    async def update() -> None:
        await trainer.update(batch)

    return update


def _scoring(trainer: Trainer, batch: TrainBatch) -> Side:
    async def score() -> None:
        await trainer.score(batch.samples, ("old",))

    return score


def _vocab(context: MegatronContext) -> int:
    return int(context.settings.trained().config.vocab_size)
