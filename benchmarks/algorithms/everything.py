"""`python -m benchmarks algorithms`: every arm over every seed, and what each gained."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError, did_you_mean
from agentrl.types import JSON
from agentrl.view.console import RunConsole
from benchmarks.algorithms.run import Job, mean_of, run_job
from benchmarks.algorithms.settings import WARM_START, Arm, control, estimators, lags
from benchmarks.config import AlgorithmsBench
from benchmarks.machine import machine

TARGET = 0.15
"""What the lower end of every estimator's interval must lie above (success rate)."""

# Student's t at 97.5%, by degrees of freedom from 1 on.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Gain(NamedTuple):
    """Mean over the seeds, and its 95% interval."""

    mean: float
    low: float
    high: float


class Compared(NamedTuple):
    """Scores by seed; metrics: their means over iterations and seeds."""

    before: list[float]
    after: list[float]
    gain: Gain
    metrics: dict[str, float]

    def as_json(self) -> dict[str, JSON]:
        """Plain values."""
        return {
            "before": [*self.before],
            "after": [*self.after],
            "gain": self.gain._asdict(),
            "metrics": {**self.metrics},
        }


def bench_algorithms(bench: AlgorithmsBench, console: RunConsole) -> dict[str, JSON]:
    """Run what has not been run yet, `jobs` at once, and compare every arm with its seeds' warm starts.

    Returns:
        summary: one line an arm. arms: scores and gains by seed, means, intervals. runs: every result.

    Raises:
        UserError: no such arm, too few seeds, or a run cannot be made.
    """
    arms = _chosen(bench.only)
    if not 2 <= len(bench.seeds) <= len(_T_975) + 1:
        raise UserError(f"An interval needs 2 to {len(_T_975) + 1} seeds; mend --seeds.")
    warm = [Job(bench, Arm(WARM_START), seed) for seed in bench.seeds]
    jobs = [Job(bench, arm, seed) for arm in arms for seed in bench.seeds]
    # All warm starts first: the arms begin from them.
    results = _done(f"{WARM_START}s", warm, console) | _done("arms", jobs, console)
    found = {
        arm.name: compared(
            [results[Job(bench, Arm(WARM_START), seed).name] for seed in bench.seeds],
            [results[Job(bench, arm, seed).name] for seed in bench.seeds],
        )
        for arm in arms
    }
    return {
        "benchmark": "algorithms",
        "summary": {arm.name: _line(found[arm.name], arm in estimators()) for arm in arms},
        "arms": {name: one.as_json() for name, one in found.items()},
        "settings": {**bench.model_dump(mode="json"), "target": TARGET},
        "machine": machine(),
        "runs": [*results.values()],
    }


def compared(before: Sequence[Mapping[str, JSON]], after: Sequence[Mapping[str, JSON]]) -> Compared:
    """An arm's results beside those of the warm starts, seed by seed."""
    old, new = [mean_of(row) for row in before], [mean_of(row) for row in after]
    differences = np.subtract(new, old)
    return Compared(old, new, gain(differences), _metrics(after))


def gain(differences: npt.NDArray[np.float64]) -> Gain:
    """The mean of paired differences, one a seed, with Student's 95% interval."""
    n, mean = len(differences), float(differences.mean())
    reach = _T_975[n - 2] * float(differences.std(ddof=1)) / n**0.5
    return Gain(mean, mean - reach, mean + reach)


def _chosen(only: Sequence[str]) -> Sequence[Arm]:
    arms = [*estimators(), control(), *lags()]
    names = [arm.name for arm in arms]
    if unknown := [name for name in only if name not in names]:
        raise UserError(
            f"There is no arm `{unknown[0]}`; there are {', '.join(names)}.{did_you_mean(unknown[0], names)}"
        )
    return [arm for arm in arms if arm.name in only or not only]


def _done(title: str, jobs: Sequence[Job], console: RunConsole) -> dict[str, dict[str, JSON]]:
    """The results by the names of the jobs, each told as soon as it is there."""
    results: dict[str, dict[str, JSON]] = {}
    with (
        ProcessPoolExecutor(
            jobs[0].bench.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
        ) as pool,
        console.stage(title, len(jobs)) as bar,
    ):
        running = {pool.submit(run_job, job): job.name for job in jobs}
        try:
            for ended in as_completed(running):
                name = running[ended]
                results[name] = _result(ended, name)
                console.line(f"  {name}: {mean_of(results[name]):.3f}")
                bar.advance(1)
        finally:
            # After a failure or Ctrl-C, what has not begun does not begin.
            pool.shutdown(cancel_futures=True)
    return {job.name: results[job.name] for job in jobs}


def _result(ended: Future[dict[str, JSON]], name: str) -> dict[str, JSON]:
    try:
        return ended.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"the process of {name}, or of one beside it, was killed; call the command again: what was "
            "finished is kept."
        ) from error


def _line(found: Compared, has_target: bool) -> str:
    before, after = (statistics.fmean(scores) for scores in (found.before, found.after))
    mean, low, high = found.gain
    told = f"{before:.3f} -> {after:.3f}, gain {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    if not has_target:
        return told
    return f"{told}, target {TARGET} {'met' if low > TARGET else 'missed'}"


def _metrics(rows: Iterable[Mapping[str, JSON]]) -> dict[str, float]:
    """Means over the seeds."""
    values: dict[str, list[float]] = {}
    for row in rows:
        told = row["metrics"]
        for name, value in (told if isinstance(told, dict) else {}).items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(found) for name, found in values.items()}
