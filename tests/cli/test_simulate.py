"""`agentrl simulate`: one run, values of max_staleness side by side, splits of GPUs, a written model."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import main

SMALL = (
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--iterations", "16"),
    *("--turns", "2", "--turns-p95", "4"),
)


def simulated(capsys, *arguments):
    main(["simulate", *SMALL, *arguments])
    return capsys.readouterr().out


def test_values_of_max_staleness_are_compared_and_the_fastest_is_marked(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = simulated(capsys, "--max-staleness", "0,1,2")
    rows = [line.split() for line in out.splitlines() if "1 + 1" in line]
    assert [row[-8] for row in rows] == ["0", "1", "2"]
    (best,) = [row for row in rows if row[0] == "*"]
    assert float(best[-7]) == max(float(row[-7]) for row in rows)
    assert "oldest: mean and maximum" in out


def test_a_large_cluster_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sizes = ("--rollout-gpus", "114688", "--train-gpus", "16384", "--engine-gpus", "1024")
    out = simulated(capsys, *sizes, "--max-staleness", "0,4")
    rows = [line for line in out.splitlines() if "114688 + 16384" in line]
    assert [len(row.removeprefix("*").split()) for row in rows] == [11, 11], out
    assert all(len(row) <= 80 and "…" not in row for row in rows)


def test_the_json_has_every_row_and_gives_the_same_numbers_again(capsys):
    first = simulated(capsys, "--max-staleness", "0,1", "--json")
    result = json.loads(first)
    assert [row["max_staleness"] for row in result["rows"]] == [0, 1]
    assert result["best"] in result["rows"]
    assert result["rows"][0]["staleness_mean"] == 0.0
    assert result["rows"][0]["groups"]["trained"] == 16 * 4
    assert result["model"]["turns"] == 2.0
    assert simulated(capsys, "--max-staleness", "0,1", "--json") == first


def test_splits_of_gpus_are_whole_engines_and_use_all_of_them(capsys):
    result = json.loads(
        simulated(capsys, "--gpus", "16", "--engine-gpus", "2", "--max-staleness", "0,1", "--json")
    )
    rows = result["rows"]
    assert all(row["rollout_gpus"] + row["train_gpus"] == 16 for row in rows)
    assert all(row["rollout_gpus"] % 2 == 0 for row in rows if not row["colocate"])
    # Engine and trainer take turns only where nothing is played beside training.
    assert {row["max_staleness"] for row in rows if row["colocate"]} == {0}
    assert result["best"]["steps_per_s"] == max(row["steps_per_s"] for row in rows)


def test_a_run_that_would_end_early_is_a_row_with_its_reason(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    out = simulated(capsys, "--failed-episodes-ratio", "0.99", "--max-episode-retries", "0")
    assert "ended" in out
    assert "3 groups in a row could not be played" in out


def test_a_run_file_gives_the_settings_and_flags_win(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[rollout]\nmax_staleness = 2\n[algorithm]\ncorrection = 'tis'\n")
    row = json.loads(simulated(capsys, str(path), "--json"))["rows"][0]
    assert row["max_staleness"] == 2
    assert row["events"]["staleness_bound"] == 3
    strict = json.loads(simulated(capsys, str(path), "--staleness-policy", "strict", "--json"))["rows"][0]
    assert strict["events"]["staleness_bound"] == 2


@pytest.mark.parametrize("flag", ["--train-tok-per-s", "--decode-step-s"])
def test_a_model_that_was_saved_can_be_changed_by_flags(capsys, tmp_path, flag):
    model = str(tmp_path / "model.toml")
    before = json.loads(simulated(capsys, flag, "0.5", "--save-model", model, "--json"))["rows"][0]
    again = json.loads(simulated(capsys, "--model", model, "--json"))["rows"][0]
    assert again == before
    other = json.loads(simulated(capsys, "--model", model, flag, "0.25", "--json"))["rows"][0]
    assert other["steps_per_s"] != before["steps_per_s"]
