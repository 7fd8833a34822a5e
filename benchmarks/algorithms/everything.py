"""`python -m benchmarks algorithms`: every arm over every seed, with its gain."""

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
from benchmarks.algorithms.settings import WARM_START, AlgorithmArm, controls, estimators, lags, variants
from benchmarks.config import AlgorithmsBench
from benchmarks.machine import machine

TARGET = 0.15
"""The target for the lower end of every estimator's interval (success rate)."""

# Student's t at 97.5%, by degrees of freedom from 1 on.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Gain(NamedTuple):
    """Mean over the seeds, and its 95% interval."""

    mean: float
    low: float
    high: float


class ScoreGains(NamedTuple):
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
    """Run all arms without a saved result, `jobs` at once, and compare each with its seeds' warm starts.

    Returns:
        summary: one line an arm. arms: scores and gains by seed, means, intervals. runs: every result.

    Raises:
        UserError: no such arm, too few seeds, or a run fails.
    """
    arms = _selected_arms(bench.only)
    if not 2 <= len(bench.seeds) <= len(_T_975) + 1:
        raise UserError(f"An interval needs 2 to {len(_T_975) + 1} seeds; mend --seeds.")
    warm = [Job(bench, AlgorithmArm(WARM_START), seed) for seed in bench.seeds]
    jobs = [Job(bench, arm, seed) for arm in arms for seed in bench.seeds]
    # All warm starts come first: the arms start from them.
    results = _run(f"{WARM_START}s", warm, console) | _run("arms", jobs, console)
    comparisons = {
        arm.name: compare(
            [results[Job(bench, AlgorithmArm(WARM_START), seed).name] for seed in bench.seeds],
            [results[Job(bench, arm, seed).name] for seed in bench.seeds],
        )
        for arm in arms
    }
    learning = [*estimators(), *variants()]
    return {
        "benchmark": "algorithms",
        "summary": {arm.name: _line(comparisons[arm.name], arm in learning) for arm in arms},
        "arms": {name: comparison.as_json() for name, comparison in comparisons.items()},
        "settings": {**bench.model_dump(mode="json"), "target": TARGET},
        "machine": machine(),
        "runs": [*results.values()],
    }


def compare(before: Sequence[Mapping[str, JSON]], after: Sequence[Mapping[str, JSON]]) -> ScoreGains:
    """The comparison of an arm with the warm starts, seed by seed."""
    scores_before, scores_after = [mean_of(row) for row in before], [mean_of(row) for row in after]
    differences = np.subtract(scores_after, scores_before)
    return ScoreGains(scores_before, scores_after, gain(differences), _metrics(after))


def gain(differences: npt.NDArray[np.float64]) -> Gain:
    """The mean of paired differences, one a seed, with Student's 95% interval."""
    n, mean = len(differences), float(differences.mean())
    margin = _T_975[n - 2] * float(differences.std(ddof=1)) / n**0.5
    return Gain(mean, mean - margin, mean + margin)


def _selected_arms(only: Sequence[str]) -> Sequence[AlgorithmArm]:
    arms = [*estimators(), *variants(), *controls(), *lags()]
    names = [arm.name for arm in arms]
    if unknown := [name for name in only if name not in names]:
        raise UserError(
            f"There is no arm `{unknown[0]}`; there are {', '.join(names)}.{did_you_mean(unknown[0], names)}"
        )
    return [arm for arm in arms if arm.name in only or not only]


def _run(title: str, jobs: Sequence[Job], console: RunConsole) -> dict[str, dict[str, JSON]]:
    """The results by the names of the jobs; each is printed as soon as it is available."""
    results: dict[str, dict[str, JSON]] = {}
    with (
        ProcessPoolExecutor(
            jobs[0].bench.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
        ) as pool,
        console.stage(title, len(jobs)) as bar,
    ):
        running = {pool.submit(run_job, job): job.name for job in jobs}
        try:
            for future in as_completed(running):
                name = running[future]
                results[name] = _result(future, name)
                console.line(f"  {name}: {mean_of(results[name]):.3f}")
                bar.advance(1)
        finally:
            # After a failure or Ctrl-C, pending jobs are not started.
            pool.shutdown(cancel_futures=True)
    return {job.name: results[job.name] for job in jobs}


def _result(future: Future[dict[str, JSON]], name: str) -> dict[str, JSON]:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"the process of {name}, or of a concurrent job, was killed; call the command again: "
            "finished results are kept."
        ) from error


def _line(comparison: ScoreGains, has_target: bool) -> str:
    before, after = (statistics.fmean(scores) for scores in (comparison.before, comparison.after))
    mean, low, high = comparison.gain
    line = f"{before:.3f} -> {after:.3f}, gain {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    if not has_target:
        return line
    return f"{line}, target {TARGET} {'met' if low > TARGET else 'missed'}"


def _metrics(rows: Iterable[Mapping[str, JSON]]) -> dict[str, float]:
    """Means over the seeds."""
    values: dict[str, list[float]] = {}
    for row in rows:
        metrics = row["metrics"]
        for name, value in (metrics if isinstance(metrics, dict) else {}).items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(by_seed) for name, by_seed in values.items()}
