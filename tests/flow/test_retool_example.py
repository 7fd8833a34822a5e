"""The run files of ReTool: every setting acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.envs import find

EXAMPLES = Path(__file__).parents[2] / "examples/retool"


@pytest.mark.parametrize("name", ["run.toml", "qwen3-4b.toml"])
def test_every_setting_of_the_run_files_acts_and_their_environment_is_made(name):
    config = load_config(EXAMPLES / name, {})
    assert isinstance(config, RunConfig)
    assert list(listed_inactive(config)) == []
    env = find(config.env.env).make(**config.env.env_kwargs)
    assert [schema.name for schema in env.tool_schemas] == (["code"] if name == "run.toml" else ["python"])
