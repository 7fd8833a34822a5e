"""Parts about learning: a table of staleness and corrections, and the time until HopSearch is learned."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.records import Record, read_metrics
from agentrl.types import JSON
from benchmarks.asynchronous.comparisons import ASYNC, HOP_SEARCH, PLAIN, OnEvent
from benchmarks.asynchronous.runs import timed_run
from benchmarks.cache import cached_result
from benchmarks.config import AsyncBench

GOAL: Final = 0.90
"""The held-out success that counts as learned."""
_SAMPLED: Final = "eval/sampled"
_EVALUATED: Final[Mapping[str, JSON]] = {"eval_split": "test", "use_tensorboard": False, "num_threads": 1}
_TABLE: Final[Mapping[str, JSON]] = {
    **_EVALUATED,
    "rollout_batch_size": 16,
    "num_rollout": 24,
    "eval_interval": 1_000_000,
    "eval_episodes": 512,
}
_WALL: Final[Mapping[str, JSON]] = {**_EVALUATED, "eval_interval": 3, "eval_episodes": 256}
_SIDES: Final[Mapping[str, Mapping[str, JSON]]] = {
    PLAIN: {},
    ASYNC: {"max_staleness": 1, "correction": "tis"},
}
_Row = dict[str, JSON]
_Key = TypeVar("_Key")


class Cell(NamedTuple):
    """A run of the table."""

    max_staleness: int
    correction: str
    seed: int

    def __str__(self) -> str:
        return f"{self.column}, seed {self.seed}"

    @property
    def column(self) -> str:
        """The runs of all seeds."""
        return f"{self.max_staleness} {self.correction}"

    @property
    def settings(self) -> dict[str, JSON]:
        """Its own settings. Above max_staleness 0 no correction has to be asked for."""
        own: dict[str, JSON] = {"max_staleness": self.max_staleness, "correction": self.correction}
        if self.max_staleness and self.correction == "none":
            own["accept_bias"] = True
        return own


class SeededRun(NamedTuple):
    """A run of a side until HopSearch is learned."""

    side: str
    seed: int

    def __str__(self) -> str:
        return f"{self.side}, seed {self.seed}"


class Budget:
    """The time of one call: no run starts that would probably end after it.

    left_out: the names of runs that were not started.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + 60 * minutes
        self._longest_s = 0.0
        self.left_out: list[str] = []

    def rows(self, runs: Mapping[_Key, Callable[[], _Row]]) -> dict[_Key, _Row]:
        """The results of the runs that were started, or had finished in an earlier call."""
        rows = {}
        for key, run in runs.items():
            began = self._clock()
            if began + self._longest_s > self._end_s:
                self.left_out.append(str(key))
                continue
            rows[key] = run()
            self._longest_s = max(self._longest_s, self._clock() - began)
        return rows


def table(bench: AsyncBench, on_event: OnEvent) -> dict[str, JSON]:
    """Steps a second and held-out success for each max_staleness and correction."""
    budget = Budget(bench.minutes)
    rows = budget.rows({cell: partial(_cell, bench, cell, on_event) for cell in cells(bench)})
    return {
        "summary": {**table_summary(rows), "left out": [*budget.left_out]},
        "runs": {str(cell): row for cell, row in rows.items()},
        "settings": {"run_file": HOP_SEARCH, **_TABLE},
    }


def cells(bench: AsyncBench) -> list[Cell]:
    """The runs, seed by seed."""
    columns = [
        (late, name)
        for late in bench.staleness
        for name in (bench.corrections if late else bench.corrections[:1])
    ]
    return [Cell(late, name, seed) for seed in bench.seeds for late, name in columns]


def table_summary(rows: Mapping[Cell, _Row]) -> dict[str, JSON]:
    """For each column: means over the seeds, the worst of them, and the difference to max_staleness 0.

    difference: mean over the seeds that have both.
    """
    base = {cell.seed: _number(row["success"]) for cell, row in rows.items() if cell.max_staleness == 0}
    summary: dict[str, JSON] = {}
    for column in dict.fromkeys(cell.column for cell in rows):
        own = {cell: row for cell, row in rows.items() if cell.column == column}
        success = {cell.seed: _number(row["success"]) for cell, row in own.items()}
        differences = [score - base[seed] for seed, score in success.items() if seed in base]
        summary[column] = {
            "steps/s": statistics.median(_number(row["steps_per_s"]) for row in own.values()),
            "success": statistics.fmean(success.values()),
            "worst": min(success.values()),
            "difference": statistics.fmean(differences) if differences else None,
            "seeds": [*success],
        }
    return summary


def _cell(bench: AsyncBench, cell: Cell, on_event: OnEvent) -> _Row:
    name = f"table-{cell.max_staleness}-{cell.correction}-seed{cell.seed}"

    def measure(folder: Path, settings: Mapping[str, JSON]) -> _Row:
        speed = asyncio.run(timed_run(HOP_SEARCH, folder, settings, skipped=(3, 1 + cell.max_staleness)))
        return {"success": held_out(read_metrics(folder / "metrics.jsonl"))[-1][1], **speed.as_json()}

    row = _cached(bench, name, {**_TABLE, **cell.settings, "seed": cell.seed}, measure, on_event)
    on_event(
        f"{cell.column}, seed {cell.seed}: success {row['success']:.3f}, {row['steps_per_s']:.3g} steps/s"
    )
    return row


def wall(bench: AsyncBench, on_event: OnEvent) -> dict[str, JSON]:
    """Wall time of RL until HopSearch is learned, from the same warm start."""
    budget = Budget(bench.minutes)
    attempts = [SeededRun(side, seed) for seed in bench.seeds for side in _SIDES]
    rows = budget.rows({attempt: partial(_seeded_run, bench, attempt, on_event) for attempt in attempts})
    sides: dict[str, JSON] = {side: dict(own) for side, own in _SIDES.items()}
    return {
        "summary": {**wall_summary(rows), "goal": GOAL, "left out": [*budget.left_out]},
        "runs": {str(attempt): row for attempt, row in rows.items()},
        "settings": {"run_file": HOP_SEARCH, **_WALL, "sides": sides},
    }


def wall_summary(rows: Mapping[SeededRun, _Row]) -> dict[str, JSON]:
    """For each side: seconds and iterations until the goal, by seed (None = not reached); the last score."""
    return {
        side: {
            str(attempt.seed): {name: row[name] for name in ("wall_s", "steps_s", "iterations", "success")}
            for attempt, row in rows.items()
            if attempt.side == side
        }
        for side in dict.fromkeys(attempt.side for attempt in rows)
    }


def _seeded_run(bench: AsyncBench, attempt: SeededRun, on_event: OnEvent) -> _Row:
    name = f"wall-{'async' if attempt.side == ASYNC else 'sync'}-seed{attempt.seed}"

    def measure(folder: Path, settings: Mapping[str, JSON]) -> _Row:
        speed = asyncio.run(timed_run(HOP_SEARCH, folder, settings, skipped=(3, 2)))
        return {**time_to(GOAL, read_metrics(folder / "metrics.jsonl")), **speed.as_json()}

    settings = {**_WALL, **_SIDES[attempt.side], "seed": attempt.seed}
    row = _cached(bench, name, settings, measure, on_event)
    on_event(f"{attempt}: {row['wall_s']} s, {row['iterations']} iterations")
    return row


def time_to(goal: float, records: Sequence[Record]) -> _Row:
    """When the held-out success first reached a goal.

    wall_s: since the first iteration began, with evaluations and records. steps_s: the iterations alone.
    Both are None where it was not reached. success: of the last evaluation.
    """
    scores = held_out(records)
    reached = next((step for step, score in scores if step and score >= goal), None)
    row: _Row = {"wall_s": None, "steps_s": None, "iterations": reached, "success": scores[-1][1]}
    if reached is None:
        return row
    steps = [record for record in records if record.get("perf/step_time") is not None]
    until = [record for record in steps if _number(record["step"]) <= reached]
    seconds = [_number(record["perf/step_time"]) for record in until]
    elapsed_s = _number(until[-1]["time_s"]) - _number(until[0]["time_s"])
    return {**row, "wall_s": elapsed_s + seconds[0], "steps_s": sum(seconds)}


def held_out(records: Sequence[Record]) -> list[tuple[int, float]]:
    """Held-out success by iteration, sampled, in the order of the evaluations."""
    scores = ((record["step"], record.get(_SAMPLED)) for record in records)
    return [(round(step or 0), score) for step, score in scores if score is not None]


def _cached(
    bench: AsyncBench,
    name: str,
    settings: Mapping[str, JSON],
    measure: Callable[[Path, Mapping[str, JSON]], _Row],
    on_event: OnEvent,
) -> _Row:
    """The result of a run that starts from the warm start of its seed, or that of an earlier call."""
    folder, seed = Path(bench.output_dir), settings["seed"]
    start = folder / f"start-seed{seed}"
    place: dict[str, JSON] = {"seed": seed, "output_dir": bench.output_dir, "name": start.name}

    def warm_start() -> _Row:
        on_event(f"warm start, seed {seed}")
        own: dict[str, JSON] = {"num_rollout": 0, "eval_episodes": 1, "use_tensorboard": False}
        agentrl.train(HOP_SEARCH, quiet=True, resume=False, **cast(TrainSettings, {**own, **place}))
        return {}

    cached_result(start, place, warm_start)
    own: dict[str, JSON] = {"hf_checkpoint": str(start / "checkpoint"), "warm_start_steps": 0}
    return cached_result(folder / name, settings, lambda: measure(folder / name, {**settings, **own}))


def _number(value: JSON) -> float:
    assert isinstance(value, int | float), value
    return float(value)
