"""What a step costs: tokens a second of one rank against the torch trainer, and of two ranks against one.

Timed is the whole call: rows, forward and backward passes, clipping, AdamW, and for Megatron the way to its
process and back. Both train the same weights on the same batch, again and again, with the same loss.
All of it is on the CPU, also where there are GPUs: the ranks do not see them.
"""

from __future__ import annotations

from agentrl.protocols import Trainer
from agentrl.types import JSON, TrainBatch
from benchmarks.compare import Side, rates
from benchmarks.engines.place import Row
from benchmarks.megatron.place import PAIRS, Place, Work, batch_of, plain
from benchmarks.megatron.settings import Workload

_ONE = "one rank"


async def bench(place: Place) -> list[Row]:
    """A row for an update and one for scoring of every workload."""
    settings, rows = place.settings, list[Row]()
    work = Work("trained", settings.trained, settings.row_tokens)
    alone = plain(work)
    with place.spread(work) as spread:
        for workload in settings.workloads:
            batch = batch_of(workload, _vocab(place))
            for what, does in (("update", _updating), ("score", _scoring)):
                sides = {"megatron": does(spread, batch), "torch": does(alone, batch)}
                rows.append(await _row(f"{what}, {workload.name}", workload, sides, place))
    return rows


async def bench_layouts(place: Place) -> list[Row]:
    """A row for each layout of two ranks: how fast it updates, by one rank alone."""
    settings, rows = place.settings, list[Row]()
    workload = settings.workloads[0]
    batch = batch_of(workload, _vocab(place))
    work = Work("trained", settings.trained, settings.layout_row_tokens)
    with place.spread(work) as alone:
        for name, sizes in PAIRS.items():
            with place.spread(work, ranks=2, **sizes) as pair:
                sides = {name: _updating(pair, batch), _ONE: _updating(alone, batch)}
                found = Workload(f"{name} by one rank", workload.lengths, None)
                rows.append(await _row(f"update, {found.name}", found, sides, place))
    return rows


async def _row(name: str, workload: Workload, sides: dict[str, Side], place: Place) -> Row:
    first, second = sides
    found = await rates(sides, sum(workload.lengths), "tokens_per_s", repeats=place.settings.repeats)
    ratio = found.medians[first] / found.medians[second]
    line = f"{ratio:.2f}x ({found.medians[first]:.0f} against {found.medians[second]:.0f} tokens/s)"
    if workload.target is not None:
        line += f", target {workload.target}x"
    place.on_event(f"{name}: {line}")
    told: dict[str, JSON] = {"device": "cpu", "ratio": ratio, "target": workload.target}
    return Row(name, line, {**told, "sides": found.told})


def _updating(trainer: Trainer, batch: TrainBatch) -> Side:
    async def update() -> None:
        await trainer.update(batch)

    return update


def _scoring(trainer: Trainer, batch: TrainBatch) -> Side:
    async def score() -> None:
        await trainer.score(batch.samples, ("old",))

    return score


def _vocab(place: Place) -> int:
    return int(place.settings.trained().config.vocab_size)
