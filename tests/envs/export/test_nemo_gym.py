"""NeMo Gym's own agents play exported resources servers over HTTP; in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from agentrl.envs.export import export_env
from tests.house.source import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PYTHON = ROOT / ".venv-nemo-gym" / "bin" / "python"
SCRIPT = Path(__file__).parent / "scripts" / "resources_server.py"


def run(*arguments, cwd):
    """What a command of NeMo Gym's environment prints."""
    assert PYTHON.exists(), "make .venv-nemo-gym/.installed makes the environment of NeMo Gym"
    done = subprocess.run(
        [PYTHON, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)])},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("env_id", "package", "agent"),
    [("HopSearch-v0", "hop_search", "simple_agent"), ("Wordle-v0", "wordle", "gymnasium_agent")],
)
def test_its_agents_reach_the_score_of_the_expert_and_of_nothing(env_id, package, agent, tmp_path):
    export_env(env_id, {}, "nemo-gym", tmp_path / "out")
    found = json.loads(run(SCRIPT, tmp_path / "out", package, env_id, cwd=tmp_path).splitlines()[-1])
    assert found["agent"] == agent
    assert found["expert"] == [1.0] * 3
    assert found["wrong"] == [0.0] * 3
    assert [parts["env"] for parts in found["parts"]] == [1.0, 0.0] * 3
    assert found["refused"] == [422, 409]
    own = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    assert "1 passed" in run(*own, cwd=tmp_path / "out")
