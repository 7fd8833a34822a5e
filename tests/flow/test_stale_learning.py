"""A world with state is learned from tokens of older weights as well as from the newest ones."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.records.diagnoses import read_diagnoses
from tests.flow.lamps import MODEL, RL, START

LATE = {"max_staleness": 1}
SIDES = {
    "synchronous": {},
    "tis": {**LATE, "correction": "tis"},
    "engine's logprobs": {**LATE, "use_rollout_logprobs": True},
}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The model after the warm start, and how often it succeeds."""
    folder = tmp_path_factory.mktemp("lamps")
    settings = {**MODEL, **START, "num_rollout": 0, "eval_episodes": 256, "eval_split": "test"}
    run = agentrl.train(**settings, seed=1, output_dir=folder, name="start", quiet=True)
    return run.folder / "checkpoint", run.reports["after warm start"]["sampled"].mean


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", SIDES)
def test_lamps_are_switched_as_they_should_be(start, tmp_path, side):
    checkpoint, before = start
    settings = {"env": MODEL["env"], **RL, **SIDES[side], "eval_split": "test"}
    model = {"hf_checkpoint": checkpoint, "warm_start_steps": 0, "eval_interval": 1000}
    run = agentrl.train(**settings, **model, seed=1, output_dir=tmp_path, name="run", quiet=True)
    report = run.reports["after RL"]
    assert before < 0.5
    assert report["sampled"].mean > before + 0.15
    assert report["greedy"].mean > 0.6
    assert not {"stale", "collapsed"} & {diagnosis.name for diagnosis in read_diagnoses(run.folder)}
