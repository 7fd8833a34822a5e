"""Does it pay to replace groups without signal? One run file with and without a dynamic sampling filter.

Two arms for each seed, with equally many updates:
    all        every complete group is in the batch
    refilled   groups whose siblings have equal rewards are dropped, and other prompts are played for them
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from agentrl.records import Record, read_metrics
from agentrl.types import JSON
from benchmarks.cache import cached_result
from benchmarks.config import RefillBench
from benchmarks.machine import machine

ALL, REFILLED = "all", "refilled"
FILTER = "agentrl.algorithms.filters:zero_std"
_DROPPED = "rollout/dynamic_filter/drop_zero_std"
_Curve = dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class RefillRun:
    """One training run of the benchmark."""

    bench: RefillBench
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """The run's folder below output_dir."""
        return f"{self.arm}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, JSON]:
        """The settings of this run that override the run file."""
        bench = self.bench
        own: dict[str, JSON] = {
            "seed": self.seed,
            "name": self.name,
            "output_dir": bench.output_dir,
            "eval_interval": bench.eval_interval,
            "eval_episodes": bench.eval_episodes,
            "use_tensorboard": False,
        }
        if bench.num_rollout is not None:
            own["num_rollout"] = bench.num_rollout
        if self.arm == REFILLED:
            own["dynamic_sampling_filter_path"] = FILTER
        return own


@dataclass(frozen=True, slots=True)
class RefillResult:
    """A finished run.

    curve: held-out accuracy by iteration and mode. prompts: played for each batch (count). with_signal:
    groups of each batch whose siblings have different rewards (count). rl_wall_s, rl_cpu_s: of the stage RL.
    """

    curve: _Curve
    prompts: tuple[float, ...]
    with_signal: tuple[float, ...]
    rl_wall_s: float
    rl_cpu_s: float

    @classmethod
    def of(
        cls, records: Iterable[Record], *, batch_size: int, rl_wall_s: float, rl_cpu_s: float
    ) -> RefillResult:
        """From the rows of metrics.jsonl; of several evaluations after one iteration the last one counts."""
        curve: _Curve = {}
        prompts, with_signal = [], []
        for record in records:
            modes = {mode: record.get(f"eval/{mode}") for mode in ("sampled", "greedy")}
            if scores := {mode: score for mode, score in modes.items() if score is not None}:
                curve[round(record["step"] or 0)] = scores
            ratio = record.get("rollout/zero_std/ratio")
            if ratio is not None:
                # The ratio is of all complete groups, the dropped ones included, none of which has signal.
                complete = batch_size + (record.get(_DROPPED) or 0.0)
                with_signal.append(float(round((1 - ratio) * complete)))
                prompts.append(record.get("rollout/prompts") or 0.0)
        return cls(curve, tuple(prompts), tuple(with_signal), rl_wall_s, rl_cpu_s)

    @classmethod
    def from_json(cls, row: dict[str, JSON]) -> RefillResult:
        """Read what `as_json` returned."""
        curve: _Curve = {}
        for point in _list(row["curve"]):
            assert isinstance(point, dict)
            curve[round(_number(point["iteration"]))] = {
                name: _number(score) for name, score in point.items() if name != "iteration"
            }
        prompts, with_signal = (tuple(map(_number, _list(row[name]))) for name in ("prompts", "with_signal"))
        return cls(curve, prompts, with_signal, _number(row["rl_wall_s"]), _number(row["rl_cpu_s"]))

    def as_json(self) -> dict[str, JSON]:
        """Plain values."""
        return {
            "curve": [{"iteration": step, **scores} for step, scores in self.curve.items()],
            "prompts": list(self.prompts),
            "with_signal": list(self.with_signal),
            "rl_wall_s": self.rl_wall_s,
            "rl_cpu_s": self.rl_cpu_s,
        }


def bench_refill(bench: RefillBench) -> dict[str, JSON]:
    """Run both arms of every seed and summarize them; finished runs are read, not repeated."""
    arms = [RefillRun(bench, arm, seed) for seed in bench.seeds for arm in (ALL, REFILLED)]
    with ProcessPoolExecutor(bench.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = list(pool.map(run_arm, arms))
    of_arm = {
        arm: [RefillResult.from_json(row) for run, row in zip(arms, rows, strict=True) if run.arm == arm]
        for arm in (ALL, REFILLED)
    }
    return {
        "benchmark": "refill",
        "settings": {**bench.model_dump(mode="json"), "filter": FILTER},
        "machine": machine(),
        "summary": {arm: summary(results) for arm, results in of_arm.items()},
        "runs": {run.name: row for run, row in zip(arms, rows, strict=True)},
    }


def run_arm(run: RefillRun) -> dict[str, JSON]:
    """Train, or read the result of an earlier call."""
    folder = Path(run.bench.output_dir) / run.name
    settings: dict[str, JSON] = {"run_file": run.bench.run_file, **run.settings}
    return cached_result(folder, settings, lambda: _trained(run).as_json())


def _trained(run: RefillRun) -> RefillResult:
    from agentrl.assembly.load import load_config
    from agentrl.run import train

    result = train(run.bench.run_file, quiet=True, resume=False, **run.settings)
    (stage,) = (stage for stage in result.stages if stage.name == "RL")
    return RefillResult.of(
        read_metrics(result.folder / "metrics.jsonl"),
        batch_size=load_config(run.bench.run_file, run.settings).rollout.prompts,
        rl_wall_s=stage.wall_s,
        rl_cpu_s=stage.cpu_s,
    )


def summary(results: Sequence[RefillResult]) -> dict[str, JSON]:
    """Means of the curve, of a run's prompts and of a batch's groups with signal; median times."""
    iterations = sorted(set.intersection(*(set(result.curve) for result in results)))
    curve: dict[str, JSON] = {
        str(step): {
            mode: statistics.fmean(result.curve[step][mode] for result in results)
            for mode in results[0].curve[step]
        }
        for step in iterations
    }

    def mean(value: Callable[[RefillResult], float]) -> float:
        return statistics.fmean(map(value, results))

    return {
        "accuracy": curve,
        "prompts": mean(lambda result: sum(result.prompts)),
        "with_signal": mean(lambda result: statistics.fmean(result.with_signal)),
        "rl_wall_s": statistics.median(result.rl_wall_s for result in results),
        "rl_cpu_s": statistics.median(result.rl_cpu_s for result in results),
    }


def _number(value: JSON) -> float:
    assert isinstance(value, int | float), value
    return float(value)


def _list(value: JSON) -> list[JSON]:
    assert isinstance(value, list), value
    return value
