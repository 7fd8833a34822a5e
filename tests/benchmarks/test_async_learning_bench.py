"""The parts of the benchmark of asynchronous training that are about learning: their runs and arithmetic."""

from __future__ import annotations

import itertools
import json

import pytest

from agentrl.assembly.load import load_config
from benchmarks.asynchronous import learning
from benchmarks.asynchronous.comparisons import ASYNC, HOP_SEARCH, PLAIN
from benchmarks.asynchronous.learning import Budget, Cell, cells, table, table_summary, time_to, wall
from benchmarks.asynchronous.runs import Speed
from benchmarks.config import AsyncBench

START = {"hf_checkpoint": "model", "warm_start_steps": 0}


def step(number, time_s, seconds):
    return {"step": number, "time_s": time_s, "perf/step_time": seconds}


def evaluated(number, time_s, success):
    return {"step": number, "time_s": time_s, "eval/sampled": success, "eval/greedy": 1.0}


ROWS = [
    evaluated(0, 3.0, 0.95),
    step(1, 10.0, 4.0),
    step(2, 16.0, 5.0),
    evaluated(2, 18.0, 0.4),
    step(3, 25.0, 6.0),
    evaluated(3, 27.0, 0.9),
    step(4, 35.0, 7.0),
    evaluated(4, 38.0, 0.8),
]


def test_the_time_ends_with_the_iteration_whose_evaluation_reached_the_goal():
    row = {"wall_s": 25.0 - 10.0 + 4.0, "steps_s": 4.0 + 5.0 + 6.0, "iterations": 3, "success": 0.8}
    assert time_to(0.9, ROWS) == row
    # What was there before the first iteration was not learned.
    assert time_to(0.91, ROWS) == {"wall_s": None, "steps_s": None, "iterations": None, "success": 0.8}


def test_the_table_compares_seeds_with_their_own_synchronous_run():
    success = {
        (0, "none", 0): 0.5,
        (0, "none", 1): 0.9,
        (2, "tis", 1): 0.8,
        (2, "tis", 2): 0.2,
        (2, "none", 0): 0.6,
    }
    rows = {Cell(*key): {"success": value, "steps_per_s": 10 * value} for key, value in success.items()}
    summary = table_summary(rows)
    assert list(summary) == ["0 none", "2 tis", "2 none"]
    assert summary["0 none"] == {
        **{"steps/s": 7.0, "success": 0.7, "worst": 0.5, "difference": 0.0, "seeds": [0, 1]}
    }
    assert summary["2 tis"]["success"] == pytest.approx(0.5)
    assert summary["2 tis"]["difference"] == pytest.approx(-0.1)
    assert summary["2 none"]["difference"] == pytest.approx(0.1)


def test_cells_are_measured_seed_by_seed_and_valid():
    bench = AsyncBench(seeds=(7, 8), staleness=(0, 2), corrections=("none", "opsm"))
    assert [str(cell) for cell in cells(bench)] == [
        f"{column}, seed {seed}" for seed in (7, 8) for column in ("0 none", "2 none", "2 opsm")
    ]
    for cell in cells(AsyncBench(seeds=(0,))):
        config = load_config(HOP_SEARCH, {**learning._TABLE, **START, **cell.settings})
        assert (config.rollout.max_staleness, config.algorithm.correction.name) == cell[:2]
        assert config.algorithm.correction.accepts_bias == (cell.column in ("1 none", "2 none", "4 none"))
    for own in learning._SIDES.values():
        load_config(HOP_SEARCH, {**learning._WALL, **START, **own})


def test_no_run_starts_that_would_end_after_the_budget():
    now = iter([0.0, *itertools.chain.from_iterable([(0.0, 30.0), (30.0, 70.0), (70.0, 80.0)]), 90.0])
    budget = Budget(2.0, clock=lambda: next(now))
    # 90 s + the 40 s of the longest run so far are more than two minutes.
    assert budget.rows({name: lambda name=name: {"name": name} for name in "abcd"}) == {
        name: {"name": name} for name in "abc"
    }
    assert budget.left_out == ["d"]


@pytest.fixture
def runs(monkeypatch):
    """The names of the runs, none of which is trained."""
    names = []

    async def timed_run(run_file, folder, settings, *, skipped):
        names.append(folder.name)
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
        return Speed(settings["seed"] + 2.0, 1.0, 2.0, 0.0, {}, 0.1)

    monkeypatch.setattr(learning, "timed_run", timed_run)
    monkeypatch.setattr(learning.agentrl, "train", lambda *_, **settings: names.append(settings["name"]))
    return names


def test_finished_runs_are_read_and_each_seed_has_one_warm_start(tmp_path, runs):
    bench = AsyncBench(seeds=(0, 3), staleness=(0, 1), corrections=("tis",), output_dir=str(tmp_path / "x"))
    result, lines = table(bench, runs.append), list(runs)
    assert [line for line in lines if line.startswith("start-")] == ["start-seed0", "start-seed3"]
    assert [line for line in lines if line.startswith("table-")] == [
        *("table-0-tis-seed0", "table-1-tis-seed0", "table-0-tis-seed3", "table-1-tis-seed3")
    ]
    assert "1 tis, seed 3: success 0.800, 5 steps/s" in lines
    assert result["summary"]["1 tis"]["steps/s"] == 3.5
    assert result["summary"]["left out"] == []
    runs.clear()
    assert table(bench, lambda line: None)["summary"] == result["summary"]
    assert runs == []


def test_both_sides_are_timed_from_the_same_warm_start(tmp_path, runs):
    bench = AsyncBench(seeds=(1,), output_dir=str(tmp_path / "x"))
    summary = wall(bench, lambda line: None)["summary"]
    assert runs == ["start-seed1", "wall-sync-seed1", "wall-async-seed1"]
    assert summary[ASYNC]["1"] == time_to(0.9, ROWS)
    assert set(summary[PLAIN]) == {"1"}
    assert json.loads(json.dumps(summary)) == summary
