"""Predictions of `agentrl simulate` against real runs: steps a second, and staleness of trained tokens."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from agentrl.assembly.load import read_run
from agentrl.records import read_metrics
from agentrl.types import JSON
from agentrl_simulate.config import SimulateSection
from agentrl_simulate.fitting import fitted, recorded_workload
from agentrl_simulate.recorded import RecordedRun, read_recorded
from agentrl_simulate.run import simulate
from benchmarks.asynchronous.comparisons import LONG_TAIL, warm_started
from benchmarks.asynchronous.runs import STEADY, timed_run
from benchmarks.compare import figures_of
from benchmarks.config import SimulateBench
from benchmarks.machine import machine

OnEvent = Callable[[str], None]
TARGET: Final = 0.15
"""The largest error of a prediction, as a share of what was measured."""
_LEAST_STALENESS: Final = 0.5
"""Errors of staleness are shares of at least this (versions)."""
_SHARED: Final[Mapping[str, JSON]] = {
    "rollout_max_response_len": 12,
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "max_slots": 128,
    "max_tokens_per_gpu": 4096,
    "num_threads": 1,
    "correction": "tis",
}
_MEASURED: Final[Mapping[str, Mapping[str, JSON]]] = {
    "measured, synchronous": {"rollout_batch_size": 12},
    "measured, asynchronous": {"rollout_batch_size": 12, "max_staleness": 3},
}
"""Runs that the model is fitted to; none of them is predicted."""


class Workload(NamedTuple):
    """An environment, and the settings of the layouts that are predicted on it."""

    env: str
    layouts: Mapping[str, Mapping[str, JSON]]


WORKLOADS: Final[Mapping[str, Workload]] = {
    "paced": Workload(
        "benchmarks.asynchronous.worlds:Paced",
        {
            "synchronous": {},
            "max_staleness 1": {"max_staleness": 1},
            "over-sampling": {"over_sampling_batch_size": 12},
            "update_weights_interval 2": {"max_staleness": 1, "update_weights_interval": 2},
        },
    ),
    "long tail": Workload(
        "benchmarks.asynchronous.worlds:Tailed",
        {
            "long tail, window 48": {"max_staleness": 2, "staleness_window": 48},
            "long tail, drained": {"max_staleness": 2, "staleness_window": 48, "partial_rollout": False},
        },
    ),
}


class Measured(NamedTuple):
    """A real run, or its prediction: iterations a second, mean staleness of trained tokens (versions)."""

    steps_per_s: float
    staleness: float


class Pair(NamedTuple):
    """A layout in one repeat."""

    real: Measured
    predicted: Measured


def bench_simulate(bench: SimulateBench, *, on_event: OnEvent = print) -> dict[str, JSON]:
    """Run the layouts and predict them.

    Returns:
        summary: of each layout, real and predicted medians over the repeats, with errors. runs: every pair.
        models: what was fitted, by workload and repeat.
    """
    pairs: dict[str, list[Pair]] = {}
    models: dict[str, JSON] = {}
    loads: list[JSON] = [os.getloadavg()[0]]
    with TemporaryDirectory(prefix="agentrl-simulate-") as temporary:
        folder = Path(temporary)
        start = warm_started(LONG_TAIL, folder, on_event)
        for seed in range(bench.repeats):
            for name, workload in WORKLOADS.items():
                shared = {**STEADY, **_SHARED, **start, "env": workload.env, "seed": seed}
                place = folder / f"{seed} {name}".replace(" ", "-")
                model, found = _repeat(bench, shared, workload, place, on_event)
                models[f"{name}, seed {seed}"] = model
                for layout, pair in found.items():
                    pairs.setdefault(layout, []).append(pair)
            loads.append(os.getloadavg()[0])
    return {
        "benchmark": "simulate",
        "summary": {layout: summary_of(found) for layout, found in pairs.items()},
        "runs": {
            layout: [{"real": pair.real._asdict(), "predicted": pair.predicted._asdict()} for pair in found]
            for layout, found in pairs.items()
        },
        "models": models,
        "settings": {**bench.model_dump(mode="json"), "load": loads, "machine": machine()},
    }


def summary_of(pairs: Sequence[Pair]) -> dict[str, JSON]:
    """Medians over the repeats, the spread of the real runs, the errors of the predictions."""
    real = figures_of([pair.real.steps_per_s for pair in pairs])
    predicted = statistics.median(pair.predicted.steps_per_s for pair in pairs)
    real_age = statistics.median(pair.real.staleness for pair in pairs)
    predicted_age = statistics.median(pair.predicted.staleness for pair in pairs)
    speed_error = predicted / real.median - 1.0
    age_error = (predicted_age - real_age) / max(real_age, _LEAST_STALENESS)
    return {
        "steps/s": real.median,
        "spread": real.spread,
        "predicted steps/s": predicted,
        "error": speed_error,
        "staleness": real_age,
        "predicted staleness": predicted_age,
        "staleness error": age_error,
        "within target": abs(speed_error) <= TARGET and abs(age_error) <= TARGET,
    }


def _repeat(
    bench: SimulateBench, shared: Mapping[str, JSON], workload: Workload, place: Path, on_event: OnEvent
) -> tuple[dict[str, JSON], dict[str, Pair]]:
    """The model that was fitted to the measured runs, and each layout with its prediction."""
    settings = {**shared, "num_rollout": bench.iterations}
    recorded: list[RecordedRun] = []
    real: dict[str, tuple[Path, Measured]] = {}
    for number, (name, own) in enumerate({**_MEASURED, **workload.layouts}.items()):
        began = time.monotonic()
        folder = place / f"run-{number}"
        measured = asyncio.run(_timed(folder, {**settings, **own}))
        if name in _MEASURED:
            recorded.append(read_recorded(folder))
        else:
            real[name] = (folder, measured)
        on_event(f"{name}: {measured.steps_per_s:.3g} steps/s ({time.monotonic() - began:.0f} s)")
    model = fitted(recorded)
    pairs = {
        name: Pair(each, _predicted(bench, folder, recorded, model)) for name, (folder, each) in real.items()
    }
    for name, pair in pairs.items():
        on_event(f"{name}: {pair.real.steps_per_s:.3g} steps/s, predicted {pair.predicted.steps_per_s:.3g}")
    return model, pairs


async def _timed(folder: Path, settings: Mapping[str, JSON]) -> Measured:
    """Run the settings; the speed and staleness of the iterations that a simulation times, too."""
    folder.parent.mkdir(exist_ok=True)
    ahead = 2 + int(str(settings.get("max_staleness", 0))) * int(
        str(settings.get("update_weights_interval", 1))
    )
    speed = await timed_run(None, folder, settings, skipped=(ahead, ahead))
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row.get("perf/step_time") is not None]
    ages = [row.get("rollout/staleness/mean") or 0.0 for row in rows[ahead : len(rows) - ahead]]
    return Measured(speed.steps_per_s, statistics.fmean(ages))


def _predicted(
    bench: SimulateBench, folder: Path, recorded: Sequence[RecordedRun], model: Mapping[str, JSON]
) -> Measured:
    """The mean over simulations of the run in a folder, by its settings alone."""
    rollout = read_run(folder).rollout
    section = SimulateSection.model_validate({**model, "iterations": 2 * bench.iterations})
    runs = [
        simulate(rollout, section, recorded_workload(recorded, rollout.n_samples_per_prompt, seed))
        for seed in range(bench.simulations)
    ]
    return Measured(
        statistics.fmean(run.steps_per_s for run in runs), statistics.fmean(run.staleness for run in runs)
    )
