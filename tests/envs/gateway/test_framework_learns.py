"""An agent of a framework, as it is, learns as much as the environment that it could have been."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.envs.gateway.boxes import PACKAGES
from tests.house.source import ROOT


def trained(folder, run_file, **variables):
    """The share of held-out tasks that are solved after a run, sampled."""
    command = ["-m", "agentrl.cli", "train", run_file, "--output-dir", str(folder), "--name", "run"]
    sizes = ["--num-demonstrations", "3000"]
    environment = {**os.environ, **variables}
    subprocess.run([sys.executable, *command, *sizes], cwd=ROOT, env=environment, check=True)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row["eval/sampled"] for row in rows if "eval/sampled" in row]


@pytest.mark.learning
@pytest.mark.timeout(3600)
def test_it_learns_as_much_as_the_native_environment(tmp_path, capsys):
    assert PACKAGES.exists(), "make .venv-clients/.installed installs the framework"
    path = os.pathsep.join([str(ROOT), str(PACKAGES)])
    framework = trained(tmp_path / "framework", "examples/framework_agent/run.toml", PYTHONPATH=path)
    native = trained(tmp_path / "native", "examples/hop_search/run.toml")
    with capsys.disabled():
        print(f"\nsampled, held out: {framework} by the framework's agent, {native} natively")
    # Before anything is learned, and after the warm start.
    assert framework[:2] == native[:2]
    assert framework[1] < 0.5
    assert framework[-1] == pytest.approx(native[-1], abs=0.03)
    assert framework[-1] > 0.9
