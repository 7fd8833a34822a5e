"""The benchmark of dynamic sampling: two arms that differ in the filter alone, counted by their metrics."""

from __future__ import annotations

import json

import pytest

from agentrl.assembly.load import load_config
from benchmarks.config import RefillBench
from benchmarks.refill import ALL, FILTER, REFILLED, RefillResult, RefillRun, bench_refill, summary

BENCH = RefillBench(num_rollout=20)


def test_the_arms_differ_in_the_filter_and_in_nothing_else():
    plain, refilled = (
        load_config(BENCH.run_file, RefillRun(BENCH, arm, 3).settings) for arm in (ALL, REFILLED)
    )
    assert plain.rollout.dynamic_sampling_filter_path is None
    assert refilled.rollout.dynamic_sampling_filter_path == FILTER
    assert plain.rollout.num_rollout == refilled.rollout.num_rollout == 20
    same = plain.model_copy(update={"rollout": refilled.rollout, "run": refilled.run})
    assert same == refilled
    assert "num_rollout" not in RefillRun(RefillBench(), ALL, 3).settings


ROWS = [
    {"step": 0, "eval/sampled": 0.1, "eval/greedy": 0.2},
    {"step": 0, "eval/sampled": 0.3, "eval/greedy": 0.4},
    {"step": 1, "rollout/zero_std/ratio": 0.25, "rollout/prompts": 4.0},
    {
        "step": 2,
        "rollout/zero_std/ratio": 1 / 3,
        "rollout/prompts": 7.0,
        "rollout/dynamic_filter/drop_zero_std": 2.0,
    },
    {"step": 2, "eval/sampled": 0.9, "eval/greedy": None},
]


def test_a_run_is_counted_by_its_metrics():
    result = RefillResult.of(ROWS, batch_size=4, rl_wall_s=9.0, rl_cpu_s=8.0)
    assert result.curve == {0: {"sampled": 0.3, "greedy": 0.4}, 2: {"sampled": 0.9}}
    # Of four groups three have signal; of six all that were not dropped.
    assert result.with_signal == (3.0, 4.0)
    assert result.prompts == (4.0, 7.0)
    assert RefillResult.from_json(json.loads(json.dumps(result.as_json()))) == result


def test_the_summary_has_means_over_the_seeds():
    results = [
        RefillResult({0: {"sampled": 0.1}, 10: {"sampled": s}}, (4.0, p), (3.0, 5.0), wall, 1.0)
        for s, p, wall in ((0.5, 6.0, 3.0), (0.7, 8.0, 5.0))
    ]
    assert summary(results) == {
        "accuracy": {"0": {"sampled": pytest.approx(0.1)}, "10": {"sampled": pytest.approx(0.6)}},
        "prompts": 11.0,
        "with_signal": 4.0,
        "rl_wall_s": 4.0,
        "rl_cpu_s": 1.0,
    }


@pytest.mark.full
def test_both_arms_run_once_over_each_seed(tmp_path):
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        '[env]\nenv = "tests.flow.worlds:Scarce"\n[model]\nnum_layers = 1\nhidden_size = 64\n'
        "[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 4\n[run]\ninline = true\n"
    )
    bench = RefillBench(
        run_file=str(run_file), seeds=(0,), num_rollout=1, eval_episodes=2, output_dir=str(tmp_path / "runs")
    )
    result = bench_refill(bench)
    assert json.loads(json.dumps(result)) == result
    assert set(result["runs"]) == {"all-seed0", "refilled-seed0"}
    refilled = result["summary"][REFILLED]
    assert refilled["with_signal"] == 2.0
    assert refilled["prompts"] >= 2.0
    assert result["summary"][ALL]["prompts"] == 2.0
    assert list(refilled["accuracy"]) == ["0", "1"]
    assert bench_refill(bench)["runs"] == result["runs"], "read, not run again"
