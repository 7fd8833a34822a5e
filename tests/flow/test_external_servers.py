"""Training on servers that somebody else started."""

from __future__ import annotations

import sys

import pytest

from agentrl.engine.served.config import CONTROL_KEY
from agentrl.errors import ConfigError
from agentrl.records import reconcile
from tests.engine.serving import free_port, running
from tests.flow.runs import WARM, metrics_of, train


@pytest.mark.full
def test_servers_that_run_already_are_fed_and_go_on_afterwards(tmp_path, monkeypatch):
    monkeypatch.setenv(CONTROL_KEY, "key-of-these-tests")
    other = train("Bandit", tmp_path, "other", num_rollout=0, seed=1, **WARM).folder / "checkpoint"
    warm = train("Bandit", tmp_path, "warm", num_rollout=0, **WARM).folder / "checkpoint"
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "agentrl.cli", "serve", other, "--port", str(port)]
    command += ["--max-slots", "64", "--max-context-len", "256"]
    settings = {"hf_checkpoint": str(warm), "engine": "sglang", "sglang_url": address, "eval_episodes": 32}
    with running(command, address, "/health", tmp_path / "server.log"):
        with pytest.raises(ConfigError, match="or use another transport"):
            train("Bandit", tmp_path, "no-loader", num_rollout=1, **settings)
        settings["update_weights_transport"] = "disk"
        for name in ("fed", "again"):
            result = train("Bandit", tmp_path, name, num_rollout=4, **settings)
        # A trainer that publishes bfloat16 begins with weights in it.
        settings |= {"trainer": "megatron", "bf16": True, "inline": False}
        half = train("Bandit", tmp_path, "half", num_rollout=1, **settings)
        assert reconcile(half.folder).problems == ()
    rows = [row for row in metrics_of(result.folder) if "rollout/raw_reward" in row]
    # The server began with weights of another run, and then had those of the run before.
    assert result.reports["before"]["sampled"].mean < result.reports["after RL"]["sampled"].mean
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-3
    assert reconcile(result.folder).problems == ()


@pytest.mark.full
def test_nobody_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="is the server up"):
        train("Bandit", tmp_path, "x", engine="sglang", sglang_url=f"http://127.0.0.1:{free_port()}")
