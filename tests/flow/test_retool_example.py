"""The run files of ReTool: every setting acts, and the one for a CPU learns in the real sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.cli.recipes import FOLDER
from agentrl.envs import find

EXAMPLES = Path(__file__).parents[2] / "examples/retool"


PATHS = (EXAMPLES / "run.toml", FOLDER / "retool-qwen3-4b.toml")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_setting_of_the_run_files_acts_and_their_environment_is_made(path):
    config = load_config(path, {})
    assert isinstance(config, RunConfig)
    assert list(listed_inactive(config)) == []
    env = find(config.env.env).make(**config.env.env_kwargs)
    assert [schema.name for schema in env.tool_schemas] == ["code" if path.parent == EXAMPLES else "python"]


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_an_agent_learns_to_run_two_programs_in_the_sandbox(tmp_path):
    fixed = {"output_dir": str(tmp_path), "quiet": True}
    run = agentrl.train(EXAMPLES / "run.toml", name="learns", **fixed)
    before, after = (run.reports[name] for name in ("after warm start", "after RL"))
    assert after["sampled"].mean >= before["sampled"].mean + 0.3
    assert after["greedy"].by["kind=two_powers"] > before["greedy"].by["kind=two_powers"] + 0.3
    # The same start, and programs whose output is withheld: what is learned is to use it.
    start = {"hf_checkpoint": str(run.folder / "checkpoint-warm-start"), "warm_start_steps": 0}
    silent = {"level": "easy", "instructions": False, "silent": True}
    control = agentrl.train(
        EXAMPLES / "run.toml", name="control", env_kwargs=silent, num_rollout=15, **fixed, **start
    )
    assert control.reports["after RL"]["sampled"].mean < 0.1
