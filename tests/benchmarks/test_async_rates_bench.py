"""The part of the benchmark of asynchronous training about learning rates: its runs, and their arithmetic."""

from __future__ import annotations

import pytest

from agentrl.assembly.load import load_config
from benchmarks.asynchronous import rates
from benchmarks.asynchronous.rates import SIDES, WORLDS, Run, rates_summary
from benchmarks.config import AsyncBench


def row(success, ess, *diagnoses):
    return {"success": success, "ess": ess, "diagnoses": [*diagnoses]}


def test_seeds_are_averaged_and_the_worst_is_told():
    runs = {
        Run("W", "tis", 1e-3, 0): row(0.5, 0.8),
        Run("W", "tis", 1e-3, 1): row(0.25, 0.1, "stale", "collapsed"),
        Run("W", "synchronous", 1e-3, 0): row(0.75, None),
    }
    assert rates_summary(runs) == {
        "W, lr 0.001, tis": {"success": 0.375, "worst": 0.25, "ess": 0.1, "told": 1, "runs": 2},
        "W, lr 0.001, synchronous": {"success": 0.75, "worst": 0.75, "ess": None, "told": 0, "runs": 1},
    }


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", WORLDS)
def test_every_side_has_valid_settings_and_differs_in_what_is_stale(name, side):
    world = WORLDS[name]
    config = load_config(None, {**world.model, **world.rl, **SIDES[side], "lr": world.rates[0]})
    assert config.rollout.max_staleness == (side != "synchronous")
    assert (config.algorithm.correction.name == "tis") == (side == "tis")


def test_runs_are_trained_with_their_rate_from_the_warm_start_of_their_seed(tmp_path, monkeypatch):
    buttons = WORLDS["Buttons"]
    small = {**buttons.rl, "num_rollout": 1, "eval_episodes": 4}
    world = buttons._replace(start={**buttons.start, "warm_start_steps": 2}, rl=small, rates=(1e-4, 2e-3))
    monkeypatch.setattr(rates, "_STEADY", {**rates._STEADY, "inline": True})
    monkeypatch.setattr(rates, "WORLDS", {"Buttons": world})
    monkeypatch.setattr(rates, "SIDES", {name: SIDES[name] for name in ("synchronous", "tis")})
    bench = AsyncBench(seeds=(3,), output_dir=str(tmp_path))
    lines = []
    result = rates.rates(bench, lines.append)
    assert [line.partition(":")[0] for line in lines] == [
        f"Buttons, lr {lr}, {side}, seed 3" for lr in ("0.0001", "0.002") for side in ("synchronous", "tis")
    ]
    assert all(0.0 <= cell["worst"] <= 1.0 for name, cell in result["summary"].items() if name != "left out")
    assert {path.name for path in tmp_path.iterdir()} >= {"rates-Buttons-start-seed3"}
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("bench.json")}
    assert rates.rates(bench, lines.append)["runs"] == result["runs"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("bench.json")} == before
