"""Does the agent learn? The quickstart's runs over fixed seeds, with controls, scored on held-out tasks.

Three arms for each seed:
    rl         the run file without changes
    shuffled   the same, every episode rewarded with a random sibling's reward
    continued  no RL: the warm start is continued for as many CPU-seconds as warm start and RL took
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from agentrl.types import JSON
from benchmarks.cache import cached_result
from benchmarks.config import QuickstartBench
from benchmarks.machine import machine


@dataclass(frozen=True, slots=True)
class QuickstartRun:
    """One training run of the benchmark: rl, shuffled or continued."""

    bench: QuickstartBench
    kind: str
    seed: int
    warm_start_steps: int | None = None

    @property
    def name(self) -> str:
        """The run's folder below output_dir."""
        return f"{Path(self.bench.run_file).parent.name}-{self.kind}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, JSON]:
        """The settings of this run that override the run file."""
        own: dict[str, JSON] = {"seed": self.seed, "name": self.name, "output_dir": self.bench.output_dir}
        if self.kind == "shuffled":
            own["shuffle_rewards"] = True
        if self.kind == "continued":
            own |= {"num_rollout": 0, "warm_start_steps": self.warm_start_steps}
        return own


def bench_quickstart(bench: QuickstartBench) -> dict[str, JSON]:
    """Run every arm of every seed and summarize the scores; finished runs are not repeated."""
    seeds = bench.seeds
    with ProcessPoolExecutor(bench.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        arms = {
            "rl": dict(
                zip(seeds, pool.map(run_arm, [QuickstartRun(bench, "rl", s) for s in seeds]), strict=True)
            )
        }
        if bench.controls:
            rl = arms["rl"]
            controls = [QuickstartRun(bench, "shuffled", s) for s in seeds]
            controls += [QuickstartRun(bench, "continued", s, _same_cpu(rl[s])) for s in seeds]
            for arm, result in zip(controls, pool.map(run_arm, controls), strict=True):
                arms.setdefault(arm.kind, {})[arm.seed] = result
    return {
        "benchmark": "quickstart",
        "settings": bench.model_dump(mode="json"),
        "machine": machine(),
        "summary": {kind: _summary(results) for kind, results in arms.items()},
        "runs": {kind: list(results.values()) for kind, results in arms.items()},
    }


def run_arm(arm: QuickstartRun) -> dict[str, JSON]:
    """Train one arm and score its checkpoints, or read the result of an earlier call."""
    scoring: dict[str, JSON] = arm.bench.model_dump(mode="json", include={"run_file", "split", "episodes"})
    folder = Path(arm.bench.output_dir) / arm.name
    return cached_result(folder, {**scoring, **arm.settings}, lambda: _trained(arm))


def _trained(arm: QuickstartRun) -> dict[str, JSON]:
    from agentrl.evaluation.model import evaluate
    from agentrl.run import train

    result = train(arm.bench.run_file, quiet=True, resume=False, **arm.settings)
    checkpoints = {"trained": result.folder / "checkpoint"}
    if arm.kind == "rl":
        checkpoints["warm_start"] = result.folder / "checkpoint-warm-start"
    scores: dict[str, JSON] = {}
    for stage, directory in checkpoints.items():
        for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            report = evaluate(
                result.env_id,
                str(directory),
                n=arm.bench.episodes,
                temperature=temperature,
                split=arm.bench.split,
                seed=arm.seed,
                quiet=True,
            )
            scores[f"{stage}/{mode}"] = report.as_json()
    return {
        "seed": arm.seed,
        "stages": [stage._asdict() for stage in result.stages],
        "cpu_s": sum(stage.cpu_s for stage in result.stages),
        "wall_s": sum(stage.wall_s for stage in result.stages),
        "scores": scores,
    }


def _same_cpu(rl: Mapping[str, JSON]) -> int:
    """Warm-start steps that take the CPU time of warm start and RL together, at the measured rate."""
    stages = {str(stage["name"]): stage for stage in _dicts(rl["stages"])}
    warm, reinforced = stages["warm start"], stages["RL"]
    ratio = (_number(warm["cpu_s"]) + _number(reinforced["cpu_s"])) / _number(warm["cpu_s"])
    return round(_number(warm["steps"]) * ratio)


def _summary(results: Mapping[int, Mapping[str, JSON]]) -> dict[str, JSON]:
    """Mean, worst and spread over the seeds of every score, and the medians of the times."""
    columns: dict[str, list[float]] = {}
    for result in results.values():
        scores = result["scores"]
        for where, report in (scores if isinstance(scores, dict) else {}).items():
            if not isinstance(report, dict):
                continue
            columns.setdefault(where, []).append(_number(report["mean"]))
            by = report["by"]
            for part, mean in (by if isinstance(by, dict) else {}).items():
                columns.setdefault(f"{where}/{part}", []).append(_number(mean))
    summary: dict[str, JSON] = {
        name: {"mean": statistics.fmean(values), "worst": min(values), "best": max(values)}
        for name, values in columns.items()
    }
    for time in ("cpu_s", "wall_s"):
        summary[time] = statistics.median(_number(result[time]) for result in results.values())
    return summary


def _number(value: JSON) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number, found {value!r}")
    return float(value)


def _dicts(value: JSON) -> list[dict[str, JSON]]:
    return [item for item in (value if isinstance(value, list) else []) if isinstance(item, dict)]
