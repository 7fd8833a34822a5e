"""Does the agent learn? The quickstart's runs over fixed seeds, with controls, scored on held-out tasks.

Three arms for each seed:
    rl         the run file as it stands
    shuffled   the same, every episode rewarded with a random sibling's reward
    continued  no RL: the warm start goes on for as many CPU-seconds as warm start and RL took
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from agentrl.types import JSON

SEEDS = (0, 1, 2, 3, 4)
NUM_EPISODES = 2048


@dataclass(frozen=True, slots=True)
class Arm:
    """One training run of the benchmark and how it is scored."""

    kind: str
    run_file: str
    seed: int
    split: str
    episodes: int
    output_dir: str
    warm_start_steps: int | None = None

    @property
    def name(self) -> str:
        """The run's folder below output_dir."""
        return f"{Path(self.run_file).parent.name}-{self.kind}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, JSON]:
        """What this arm lays over the run file."""
        own: dict[str, JSON] = {"seed": self.seed, "name": self.name, "output_dir": self.output_dir}
        if self.kind == "shuffled":
            own["shuffle_rewards"] = True
        if self.kind == "continued":
            own |= {"num_rollout": 0, "warm_start_steps": self.warm_start_steps}
        return own


def bench_quickstart(
    run_file: str,
    *,
    seeds: Sequence[int] = SEEDS,
    split: str = "test",
    episodes: int = NUM_EPISODES,
    controls: bool = True,
    output_dir: str = "runs/bench",
    jobs: int = 1,
) -> dict[str, JSON]:
    """Run every arm of every seed and condense the scores; finished arms are not run again.

    jobs: arms at once, each on one core. Wall times mean what they say only for jobs = 1 on a
    quiet machine; CPU-seconds always do.
    """
    shared = {"run_file": run_file, "split": split, "episodes": episodes, "output_dir": output_dir}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        rl = dict(zip(seeds, pool.map(run_arm, [Arm("rl", seed=s, **shared) for s in seeds]), strict=True))
        others: dict[str, dict[int, dict[str, JSON]]] = {}
        if controls:
            arms = [Arm("shuffled", seed=s, **shared) for s in seeds]
            arms += [Arm("continued", seed=s, warm_start_steps=_same_cpu(rl[s]), **shared) for s in seeds]
            for arm, result in zip(arms, pool.map(run_arm, arms), strict=True):
                others.setdefault(arm.kind, {})[arm.seed] = result
    arms_by_kind = {"rl": rl, **others}
    return {
        "benchmark": "quickstart",
        "run_file": run_file,
        "split": split,
        "episodes": episodes,
        "seeds": list(seeds),
        "jobs": jobs,
        "versions": _versions(),
        "summary": {kind: _summary(results) for kind, results in arms_by_kind.items()},
        "runs": {kind: list(results.values()) for kind, results in arms_by_kind.items()},
    }


def run_arm(arm: Arm) -> dict[str, JSON]:
    """Train one arm and score its checkpoints, or read what an earlier call left behind."""
    from agentrl.evaluate import evaluate
    from agentrl.run import train

    kept = Path(arm.output_dir) / arm.name / "bench.json"
    if kept.exists():
        found: dict[str, JSON] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    result = train(arm.run_file, quiet=True, **arm.settings)
    checkpoints = {"trained": result.folder / "checkpoint"}
    if arm.kind == "rl":
        checkpoints["warm_start"] = result.folder / "checkpoint-warm-start"
    scores: dict[str, JSON] = {}
    for stage, directory in checkpoints.items():
        for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            report = evaluate(
                result.env_id,
                str(directory),
                n=arm.episodes,
                temperature=temperature,
                split=arm.split,
                seed=arm.seed,
                quiet=True,
            )
            scores[f"{stage}/{mode}"] = report.as_json()
    row: dict[str, JSON] = {
        "seed": arm.seed,
        "settings": arm.settings,
        "stages": [stage._asdict() for stage in result.stages],
        "cpu_s": sum(stage.cpu_s for stage in result.stages),
        "wall_s": sum(stage.wall_s for stage in result.stages),
        "scores": scores,
    }
    kept.write_text(json.dumps(row), encoding="utf-8")
    return row


def _same_cpu(rl: Mapping[str, JSON]) -> int:
    """Warm-start steps that take as long as warm start and RL together, at the measured rate."""
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


def _versions() -> dict[str, JSON]:
    packages: dict[str, JSON] = {
        name: version(name) for name in ("agentrl", "torch", "transformers", "numpy")
    }
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        **packages,
    }
