"""Parts that compare the speed of runs which differ in a few settings, side by side in one call."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.types import JSON
from benchmarks.asynchronous.runs import STEADY, Speed, timed_run
from benchmarks.compare import figures_of, interleaved
from benchmarks.config import AsyncBench

ASYNC, SYNC, TWO_THREADS, PLAIN, DRAINED = (
    "asynchronous",
    "synchronous",
    "synchronous, two threads",
    "synchronous, no correction",
    "asynchronous, an update waits for all episodes",
)
HOP_SEARCH: Final = "examples/hop_search/run.toml"
_ONE_THREAD: Final[Mapping[str, JSON]] = {"num_threads": 1}
"""Of the engine's process, and of the trainer's; the run itself has one, too."""
_CORRECTED: Final[Mapping[str, JSON]] = {**_ONE_THREAD, "correction": "tis"}
OnEvent = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs that differ in the settings of their side.

    run_file: None = defaults. shared: settings of all sides. sides: their own settings. of, to: the sides
    whose speeds make the figure: `of` over the fastest one of `to`. target: of that ratio; None = none.
    warm_start: settings of a run before all others, whose model they start from; None = a fresh model.
    groups: groups that an iteration trains (count). num_skipped: iterations at the end that are not timed,
    since no further groups start then (count).
    """

    run_file: str | None
    shared: Mapping[str, JSON]
    sides: Mapping[str, Mapping[str, JSON]]
    of: str
    to: Sequence[str]
    target: float | None
    warm_start: Mapping[str, JSON] | None
    groups: int
    num_skipped: int = 2


SPEEDUP: Final = Comparison(
    HOP_SEARCH,
    # About half of such small groups have equal rewards after the warm start and are not trained on, so that
    # training takes about as long as playing.
    {"rollout_batch_size": 128, "n_samples_per_prompt": 3, "max_slots": 48},
    {
        SYNC: _CORRECTED,
        TWO_THREADS: {**_CORRECTED, "num_threads": 2},
        PLAIN: _ONE_THREAD,
        ASYNC: {**_CORRECTED, "max_staleness": 1},
    },
    ASYNC,
    (SYNC,),
    1.7,
    {
        "num_rollout": 0,
        "warm_start_steps": 80,
        "lr": 2e-3,
        "hidden_size": 384,
        "num_layers": 6,
        "ffn_hidden_size": 768,
        "num_attention_heads": 6,
        "num_query_groups": 3,
    },
    128,
)
"""The quickstart's task, and a model of 8 million parameters: playing and training take about equal time.

In small batches either side waits for the other now and then, as the work of an iteration varies, and a
larger share of the prefixes is computed again after each update.
"""
CHEAP: Final = Comparison(
    None,
    {
        "env": "benchmarks.asynchronous.worlds:Brief",
        "num_layers": 6,
        "hidden_size": 256,
        "ffn_hidden_size": 768,
        "rollout_max_response_len": 4,
        "rollout_batch_size": 16,
        "n_samples_per_prompt": 8,
    },
    {SYNC: _CORRECTED, PLAIN: _ONE_THREAD, ASYNC: {**_CORRECTED, "max_staleness": 1}},
    ASYNC,
    (SYNC,),
    0.95,
    None,
    16,
)
"""An adverse case: one short turn an episode, so there is little to overlap."""
_LATE: Final[Mapping[str, JSON]] = {**_CORRECTED, "max_staleness": 2, "staleness_window": 48}
LONG_TAIL: Final = Comparison(
    None,
    {
        "env": "benchmarks.asynchronous.worlds:Tailed",
        "rollout_max_response_len": 12,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "max_slots": 128,
        "max_tokens_per_gpu": 4096,
    },
    {ASYNC: _LATE, DRAINED: {**_LATE, "partial_rollout": False}, SYNC: _CORRECTED},
    ASYNC,
    (DRAINED, SYNC),
    1.4,
    {"num_rollout": 0, "warm_start_steps": 60, "warm_start_batch_size": 8, "num_demonstrations": 64},
    8,
    num_skipped=3,
)
"""A tenth of the groups plays twenty times as many turns as the others."""


def compared(comparison: Comparison, bench: AsyncBench, on_event: OnEvent) -> dict[str, JSON]:
    """Run all sides in turns, and compare their medians; see `report`."""
    with TemporaryDirectory(prefix="agentrl-async-") as temporary:
        folder = Path(temporary)
        start = warm_started(comparison, folder, on_event)
        sides = {
            name: partial(
                _timed, comparison, {**STEADY, **comparison.shared, **start, **own}, folder, name, on_event
            )
            for name, own in _lengthened(comparison, bench.iterations).items()
        }
        speeds = asyncio.run(interleaved(sides, repeats=bench.repeats, warm_up=False))
    return report(comparison, speeds) | {"iterations": bench.iterations}


def warm_started(comparison: Comparison, folder: Path, on_event: OnEvent) -> dict[str, JSON]:
    """The settings with which runs start from the model of the warm start, which is trained here."""
    if comparison.warm_start is None:
        return {}
    on_event("warm start")
    place: dict[str, JSON] = {"output_dir": str(folder), "name": "start"}
    settings = {**STEADY, **comparison.shared, **comparison.warm_start, **place}
    agentrl.train(comparison.run_file, quiet=True, resume=False, **cast(TrainSettings, settings))
    return {"hf_checkpoint": str(folder / "start" / "checkpoint"), "warm_start_steps": 0}


def report(comparison: Comparison, speeds: Mapping[str, Sequence[Speed]]) -> dict[str, JSON]:
    """Medians over the repeats, their spreads, and the ratio with its target.

    ratios: of `of` to each other side, of medians; repeats: the lowest and highest of single repeats.
    """
    per_s = {side: figures_of([run.steps_per_s for run in runs]) for side, runs in speeds.items()}
    medians = {side: figures.median for side, figures in per_s.items()}
    fastest = max(comparison.to, key=lambda side: medians[side])
    single = [
        own.steps_per_s / other.steps_per_s
        for own, other in zip(speeds[comparison.of], speeds[fastest], strict=True)
    ]
    return {
        "summary": {
            "ratio": medians[comparison.of] / medians[fastest],
            "target": comparison.target,
            "against": fastest,
            "repeats": [min(single), max(single)],
            "steps/s": {
                side: f"{figures.median:.3g} (spread {figures.spread:.0%})" for side, figures in per_s.items()
            },
            "ratios": {
                side: medians[comparison.of] / median
                for side, median in medians.items()
                if side != comparison.of
            },
            "groups/s": {side: comparison.groups * median for side, median in medians.items()},
            "an iteration": {side: anatomy(runs) for side, runs in speeds.items()},
        },
        "runs": {side: [run.as_json() for run in runs] for side, runs in speeds.items()},
        "settings": {
            "run_file": comparison.run_file,
            "shared": {**STEADY, **comparison.shared},
            "sides": {side: dict(own) for side, own in comparison.sides.items()},
        },
    }


def anatomy(runs: Sequence[Speed]) -> dict[str, JSON]:
    """Where the time of an iteration goes: medians over the repeats.

    A trainer that waits for groups shows in wait_s, an engine that waits in its share of a core (busy).
    """
    busy: dict[str, JSON] = {
        side: statistics.median(run.busy[side] for run in runs if side in run.busy)
        for side in runs[0].busy
        if all(side in run.busy for run in runs)
    }
    return {
        "wait_s": statistics.median(run.wait_s for run in runs),
        "train_s": statistics.median(run.train_s for run in runs),
        "publish_s": statistics.median(run.publish_s for run in runs),
        "busy": busy,
        "longest_stall_s": max(run.lag_s for run in runs),
    }


def _lengthened(comparison: Comparison, iterations: int) -> dict[str, dict[str, JSON]]:
    return {side: {**own, "num_rollout": iterations} for side, own in comparison.sides.items()}


async def _timed(
    comparison: Comparison, settings: Mapping[str, JSON], folder: Path, side: str, on_event: OnEvent
) -> Speed:
    began = time.monotonic()
    with TemporaryDirectory(dir=folder) as place:
        speed = await timed_run(
            comparison.run_file, Path(place) / "run", settings, skipped=(3, comparison.num_skipped)
        )
    on_event(f"{side}: {speed.steps_per_s:.3g} steps/s ({time.monotonic() - began:.0f} s)")
    return speed
