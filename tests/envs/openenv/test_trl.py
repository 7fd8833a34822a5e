"""TRL's GRPOTrainer trains on an environment that `agentrl serve-env` serves, by the program of the guide."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envs_contrib.calculator import Calculator
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-trl" / "bin" / "python"
SCRIPT = Path(__file__).parent / "scripts" / "trl_grpo.py"
GUIDE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```text\n(import json\n.*?GRPOTrainer.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
TASK = Calculator(max_calls=1).tasks("train")[0]
SERVE = ["serve-env", "Calculator-v0", "--env-kwargs", '{"max_calls": 1}', "--port", "0", "--json"]


@pytest.mark.timeout(1200)
def test_the_program_of_the_guide_trains_a_random_model_until_the_served_environment_pays(tmp_path):
    assert PYTHON.exists(), "make .venv-trl/.installed makes the environment of TRL"
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    (call,) = next(Calculator().expert(TASK)).tool_calls
    answer = str(eval(call.arguments["expression"]))
    server = subprocess.Popen([sys.executable, "-m", "agentrl.cli", *SERVE], stdout=subprocess.PIPE)
    try:
        url = json.loads(server.stdout.readline())["url"]
        done = subprocess.run(
            [PYTHON, SCRIPT, "train.py", url],
            input=json.dumps([call.arguments["expression"], answer, str(int(answer) + 1)]) + "\n",
            cwd=tmp_path,
            env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=1100,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
    found = json.loads(done.stdout.splitlines()[-1])
    rewards, calls, failures = zip(*found["steps"], strict=True)
    assert len(rewards) == 16
    assert found["changed"] > 0
    # Rewards of 16 completions are whole points: what the environment paid, and nothing between.
    assert all(abs(16 * reward - round(16 * reward)) < 1e-4 and 0 <= reward <= 1 for reward in rewards)
    assert sum(calls) > 0
    assert set(failures) == {0.0}
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.1
