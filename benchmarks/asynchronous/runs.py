"""One run as a side of a comparison: steps a second, and the CPU time of its processes meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.records import Record, read_metrics
from agentrl.run.stages import process_tree, tree_cpu_time
from agentrl.types import JSON

DRIVER, ENGINE, TRAINER = "driver", "engine", "trainer"
_MODULES: Final = {"agentrl.engine.embedded": ENGINE, "agentrl.processes.hosted": TRAINER}
"""The module that a process of a run is started with, and its side."""
_TIMED: Final = '"perf/step_time"'
_PERIOD_S = 0.05
STEADY: Final[Mapping[str, JSON]] = {
    "eval_interval": 1_000_000,
    "eval_episodes": 1,
    "save_interval": 1_000_000,
    "use_tensorboard": False,
    # The policy moves too little to change the work of an iteration, and every iteration publishes.
    "lr": 1e-7,
    "lr_warmup_iters": 0,
    "lr_decay_style": "constant",
}
"""Settings of a run that does the same work in every iteration, and nothing else."""


class Usage(NamedTuple):
    """When so many iterations had ended, and the CPU time of each side by then (seconds)."""

    iterations: int
    at_s: float
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a run between two of its iterations.

    steps_per_s: iterations a second. wait_s, train_s, publish_s: medians of an iteration's phases: its wait
    for a batch, scoring and updates, publishing (seconds). busy: CPU time of each side over wall time: 1 = a
    full core. lag_s: the longest stall of the event loop (seconds).
    """

    steps_per_s: float
    wait_s: float
    train_s: float
    publish_s: float
    busy: Mapping[str, float]
    lag_s: float

    @classmethod
    def of(cls, records: Sequence[Record], usages: Sequence[Usage], *, first: int, last: int) -> Speed:
        """From the end of iteration `first` to that of `last`, counted from 1.

        records: the rows of metrics.jsonl. usages: in the order of time.

        Raises:
            ValueError: the run has fewer iterations.
        """
        rows = [row for row in records if row.get("perf/step_time") is not None]
        if not 1 <= first < last <= len(rows):
            raise ValueError(f"a run of {len(rows)} iterations cannot be timed from {first} to {last}")
        timed = rows[first:last]
        seconds = _value(rows[last - 1], "time_s") - _value(rows[first - 1], "time_s")

        def median(*names: str) -> float:
            return statistics.median(sum(_value(row, f"perf/{name}") for name in names) for row in timed)

        return cls(
            (last - first) / seconds,
            median("rollout_time"),
            median("log_probs_time", "actor_train_time"),
            median("update_weights_time"),
            _busy(usages, first, last),
            max(_value(row, "perf/event_loop_lag_max") for row in timed),
        )

    def as_json(self) -> dict[str, JSON]:
        """Plain values."""
        return {**asdict(self), "busy": dict(self.busy)}


async def timed_run(
    run_file: str | None, folder: Path, settings: Mapping[str, JSON], *, skipped: tuple[int, int]
) -> Speed:
    """Run `agentrl train`, and measure it without its first and last iterations.

    folder: of the run; it does not exist yet. skipped: iterations at both ends that are not timed (counts).
    """
    usages: list[Usage] = []
    watch = asyncio.create_task(_watch(folder / "metrics.jsonl", usages))
    place: dict[str, JSON] = {"output_dir": str(folder.parent), "name": folder.name}
    try:
        await agentrl.train_async(
            run_file, quiet=True, resume=False, **cast(TrainSettings, {**settings, **place})
        )
    finally:
        watch.cancel()
        await asyncio.wait([watch])
    records = read_metrics(folder / "metrics.jsonl")
    number = sum(row.get("perf/step_time") is not None for row in records)
    return Speed.of(records, usages, first=skipped[0], last=number - skipped[1])


async def _watch(metrics: Path, usages: list[Usage]) -> None:
    """Note the usage at the end of each iteration, until it is cancelled."""
    while True:
        with suppress(FileNotFoundError):
            number = metrics.read_text(encoding="utf-8").count(_TIMED)
            if number > (usages[-1].iterations if usages else 0):
                usages.append(Usage(number, time.perf_counter(), _cpu_times()))
        await asyncio.sleep(_PERIOD_S)


def _cpu_times() -> dict[str, float]:
    """CPU time by side so far; helpers of the driver count for it, without those that have ended."""
    times = {DRIVER: time.process_time(), ENGINE: 0.0, TRAINER: 0.0}
    for pid in list(process_tree())[1:]:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            side = next((side for module, side in _MODULES.items() if module in words), None)
            if side is not None:
                times[side] += tree_cpu_time(pid)
    return times


def _busy(usages: Sequence[Usage], first: int, last: int) -> dict[str, float]:
    begin = next((usage for usage in usages if usage.iterations >= first), None)
    end = next((usage for usage in usages if usage.iterations >= last), None)
    if begin is None or end is None or begin is end:
        return {}
    seconds = end.at_s - begin.at_s
    return {side: (cpu_s - begin.cpu_s[side]) / seconds for side, cpu_s in end.cpu_s.items()}


def _value(row: Record, name: str) -> float:
    value = row[name]
    if value is None:
        raise ValueError(f"{name} is not a finite number in iteration {row['step']}")
    return value
