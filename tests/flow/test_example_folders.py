"""The example folders do what their READMEs say: small runs of their run files."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agentrl
from agentrl import ScriptedAgent, play, say
from agentrl.run.audit import audit
from tests.flow.runs import SHAPE, journal_of, metrics_of
from tests.house.source import ROOT

SMALL = {
    **SHAPE,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "num_rollout": 1,
    "eval_episodes": 4,
    "inline": True,
    "quiet": True,
}
WARM = {"warm_start_steps": 20, "num_demonstrations": 64}


@pytest.fixture
def examples(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return Path("examples")


def test_a_team_is_paid_for_what_it_leads_to(examples):
    result = agentrl.train(examples / "multi_agent/run.toml", **SMALL, **WARM)
    for entry in journal_of(result.folder, "step_*"):
        turns = [
            turn
            for one in entry["episode"]["trajectories"]
            for turn in one["turns"]
            if one["agent"] == "solver"
        ]
        extra = 0.0
        if len(turns) == 2:
            extra = 0.5 * (turns[1]["action"]["content"].strip() == entry["episode"]["task"]["answer"])
        solver, critic = entry["verdicts"]
        assert set(solver["parts"]) == {"env"}
        assert critic["parts"].get("shared", 0.0) == extra
        assert critic["total"] == pytest.approx(critic["parts"]["env"] + extra)
    by_role = {"rollout/raw_reward/solver", "rollout/raw_reward/critic"}
    assert any(by_role <= row.keys() for row in metrics_of(result.folder))


@pytest.mark.parametrize(("first", "expected"), [("odd", {"critic": 0.5}), ("even", {})])
async def test_the_critic_is_paid_where_the_solver_answered_again(first, expected):
    env = agentrl.make("SolverCritic-v0")
    task = next(task for task in env.tasks("train") if task.answer == "even")

    def solver(_):
        yield say(first)
        yield say("even")

    def critic(prompt):
        yield say("wrong" if "odd:" in prompt else "right")

    agents = {"solver": ScriptedAgent(solver), "critic": ScriptedAgent(critic)}
    team = runpy.run_path(str(ROOT / "examples/multi_agent/team.py"))
    assert team["shared"]([await play(env, agents, task)]) == [expected]


def test_each_held_out_set_has_settings_and_metrics_of_its_own(examples):
    runpy.run_path(str(examples / "eval_multi_task/write_data.py"), run_name="__main__")
    result = agentrl.train(examples / "eval_multi_task/run.toml", **SMALL)
    metrics = {name for row in metrics_of(result.folder) for name in row}
    assert {
        f"eval/{name}/{mode}" for name in ("sums", "choices", "doubles") for mode in ("sampled", "greedy")
    } <= metrics
    assert "eval/choices/sampled/pass@4" in metrics
    assert "eval/sums/sampled/pass@4" not in metrics
    told = {
        entry["episode"]["task"]["prompt"][0]["content"] for entry in journal_of(result.folder, "*choices*")
    }
    assert told == {"Answer with a letter."}


def test_one_table_scores_several_environments(examples):
    runpy.run_path(str(examples / "eval_multi_task/write_data.py"), run_name="__main__")
    command = [sys.executable, "-m", "agentrl.cli", "benchmark", str(examples / "eval_multi_task/suite.toml")]
    done = subprocess.run(
        [*command, "--n", "2", "--output-dir", "runs/table"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for row in ("single/sums", "single/doubles", "Calculator-v0", "HopSearch-v0"):
        assert row in done.stdout


def weights(folder: Path) -> bytes:
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(examples):
    run_file = str(examples / "reproducibility/run.toml")
    train = [sys.executable, "-m", "agentrl.cli", "train"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = [*train, run_file, "--name", "one"]
    subprocess.run(first, check=True, env=environment, stdout=subprocess.DEVNULL)
    assert sum("train/loss" in row for row in metrics_of(Path("runs/one"))) == 6, "each iteration learns"
    killed = subprocess.Popen(
        [*train, run_file, "--name", "other"],
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = Path("runs/other/metrics.jsonl")
    while not (metrics.exists() and metrics.read_text().count("train/loss") >= 3):
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    subprocess.run([*train, "runs/other", "--resume"], check=True, env=environment, stdout=subprocess.DEVNULL)
    compare = [sys.executable, str(examples / "reproducibility/same_weights.py"), "runs/one", "runs/other"]
    done = subprocess.run(compare, capture_output=True, text=True, check=True)
    assert done.stdout == "the same, bit for bit\n"
    assert audit(Path("runs/other")).problems == ()
    assert weights(Path("runs/one")) == weights(Path("runs/other"))
    another = subprocess.run(
        [*compare[:2], "runs/one", "runs/third"], capture_output=True, text=True, check=False
    )
    assert another.returncode


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--inline", "--enable-deterministic-inference")], ids=" ".join)
def test_the_trainers_logprobs_are_those_of_the_engine_but_for_the_last_bits(examples, tmp_path, flags):
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "numerics",
        examples / "true_on_policy/run.toml",
        "--json",
    ]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] > 1000
    assert 0.3 < found["equal"] < 1
    assert 1e-8 < found["logprob_abs_diff"] < 1e-6
    assert found["median"] <= found["p99"] <= found["largest"] < 4e-6
    assert not (tmp_path / "runs").exists()
