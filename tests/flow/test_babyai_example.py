"""The run file of BabyAI: every setting acts, and it learns over many turns."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.assembly.load import listed_inactive, load_config

EXAMPLE = Path(__file__).parents[2] / "examples/babyai/run.toml"


def test_every_setting_of_the_run_file_acts():
    assert list(listed_inactive(load_config(EXAMPLE, {}))) == []


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_an_agent_learns_to_walk_straight(tmp_path):
    fixed = {"output_dir": str(tmp_path), "quiet": True}
    run = agentrl.train(EXAMPLE, name="learns", **fixed)
    before, after = (run.reports[name]["sampled"] for name in ("after warm start", "after RL"))
    assert after.mean > before.mean + 0.25
    assert after.turns < before.turns - 1.5
    start = {"hf_checkpoint": str(run.folder / "checkpoint-warm-start"), "warm_start_steps": 0}
    shuffled = agentrl.train(EXAMPLE, name="shuffled", shuffle_rewards=True, num_rollout=15, **fixed, **start)
    assert shuffled.reports["after RL"]["sampled"].mean < before.mean + 0.1
