from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.types import JSON
from benchmarks.config import QuickstartBench
from benchmarks.quickstart import QuickstartRun, _same_cpu, _summary, run_arm


def score(mean: float, **by: float) -> dict[str, JSON]:
    return {"mean": mean, "by": dict(by)}


def test_each_arm_overrides_the_run_file_with_its_own_settings() -> None:
    bench = QuickstartBench(run_file="examples/calculator/run.toml", output_dir="somewhere")
    shared = {"seed": 3, "output_dir": "somewhere"}
    assert QuickstartRun(bench, "rl", 3).settings == {**shared, "name": "calculator-rl-seed3"}
    shuffled = QuickstartRun(bench, "shuffled", 3).settings
    assert shuffled == {**shared, "name": "calculator-shuffled-seed3", "shuffle_rewards": True}
    continued = QuickstartRun(bench, "continued", 3, 960).settings
    name = "calculator-continued-seed3"
    assert continued == {**shared, "name": name, "num_rollout": 0, "warm_start_steps": 960}


def test_the_continued_warm_start_takes_the_cpu_time_of_both_stages() -> None:
    stages: list[JSON] = [
        {"name": "warm start", "steps": 250, "cpu_s": 20.0},
        {"name": "RL", "steps": 30, "cpu_s": 60.0},
    ]
    assert _same_cpu({"stages": stages}) == 1000


def test_the_summary_holds_mean_worst_and_best_of_every_score() -> None:
    runs = {
        seed: {"scores": {"trained/sampled": score(mean, two=mean / 2)}, "cpu_s": cpu, "wall_s": 9.0}
        for seed, mean, cpu in ((0, 0.5, 10.0), (1, 1.0, 30.0), (2, 0.9, 11.0))
    }
    summary = _summary(runs)
    assert summary["trained/sampled"] == pytest.approx({"mean": 0.8, "worst": 0.5, "best": 1.0})
    assert summary["trained/sampled/two"] == pytest.approx({"mean": 0.4, "worst": 0.25, "best": 0.5})
    assert summary["cpu_s"] == 11.0


def test_a_finished_arm_is_read_and_not_run_again(tmp_path: Path) -> None:
    arm = QuickstartRun(QuickstartBench(output_dir=str(tmp_path)), "rl", 0)
    scoring = {"run_file": "examples/hop_search/run.toml", "split": "test", "episodes": 2048}
    folder = tmp_path / arm.name
    folder.mkdir()
    result = {"settings": {**scoring, **arm.settings}, "seed": 0, "cpu_s": 1.5}
    (folder / "bench.json").write_text(json.dumps(result))
    assert run_arm(arm) == result


def test_seeds_are_read_from_a_flag() -> None:
    assert QuickstartBench.model_validate({"seeds": "3, 5"}).seeds == (3, 5)
