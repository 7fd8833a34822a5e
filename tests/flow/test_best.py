"""Where the last weights are worse than earlier ones, the best are kept, as a model of their own."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentrl
from tests.flow.runs import WARM, train
from tests.flow.worlds import Bandit

# The bonus on entropy is far larger than the reward's gradient.
RUINED = {**WARM, "num_rollout": 4, "entropy_coef": 0.3, "eval_interval": 1, "eval_episodes": 32}


def weights(folder):
    return load_file(folder / "model.safetensors")


def are_equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_the_best_weights_are_a_model_where_the_last_are_worse(tmp_path):
    result = train("Bandit", tmp_path, "ruined", **RUINED)
    scores = {row["step"]: row["eval/sampled"] for row in result.metrics if "eval/sampled" in row}
    best = max(scores, key=scores.get)
    assert scores[best] > scores[4] + 0.1
    kept = {
        path.name: json.loads((path / "state.json").read_text())
        for path in (result.folder / "checkpoints").glob("step_*")
    }
    assert f"step_{best:06d}" in kept
    assert not are_equal(weights(result.folder / "checkpoint-best"), weights(result.folder / "checkpoint"))
    if best == 0:
        assert are_equal(
            weights(result.folder / "checkpoint-best"), weights(result.folder / "checkpoint-warm-start")
        )
    again = agentrl.evaluate(Bandit, result.folder / "checkpoint-best", n=32, quiet=True, num_threads=1)
    assert again.mean == pytest.approx(scores[best], abs=0.25)


def test_there_is_none_where_the_last_are_the_best_or_none_is_wanted(tmp_path):
    steady = {
        **WARM,
        "num_rollout": 2,
        "lr": 1e-7,
        "eval_interval": 1,
        "eval_episodes": 8,
        "eval_temperature": 0.0,
    }
    assert not (train("Bandit", tmp_path, "steady", **steady).folder / "checkpoint-best").exists()
    unwanted = {**RUINED, "metric_for_best_model": "none"}
    assert not (train("Bandit", tmp_path, "unwanted", **unwanted).folder / "checkpoint-best").exists()
