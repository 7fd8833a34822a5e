"""OpenEnv's own validation takes an exported folder, and its own client plays what the folder serves."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from agentrl import make
from agentrl.envs.export import export_env
from tests.house.source import ROOT

pytestmark = pytest.mark.full

CLIENTS = ROOT / ".venv-clients" / "bin"
SCRIPTS = Path(__file__).parent / "scripts"
KWARGS = {"seed": 3, "max_calls": 2}


@pytest.fixture
def folder(tmp_path):
    assert CLIENTS.exists(), "make .venv-clients/.installed makes the environment of OpenEnv"
    return tmp_path / export_env("Calculator-v0", KWARGS, "openenv", tmp_path / "calculator").package


def test_openenv_finds_nothing_to_mend_and_what_is_declared_is_what_the_world_has(folder):
    report = folder.parent / "report.json"
    validate = [CLIENTS / "openenv", "validate", folder, "--level", "static", "--skip-build"]
    subprocess.run([*validate, "--output", report], check=True, capture_output=True, timeout=120)
    found = json.loads(report.read_text())
    assert (found["verdict"], [result["status"] for result in found["results"]]) == ("pass", ["pass"])
    # What `openenv push` asks of a folder.
    check = "from openenv.cli._cli_utils import validate_env_structure as check; import pathlib, sys; "
    check += "check(pathlib.Path(sys.argv[1]))"
    subprocess.run([CLIENTS / "python", "-c", check, folder], check=True, timeout=120)
    env, declared = make("Calculator-v0", **KWARGS), yaml.safe_load((folder / "openenv.yaml").read_text())
    capabilities = declared["validation"]["capabilities"]
    assert capabilities["declared_tools"] == [tool.name for tool in env.tool_schemas]
    assert capabilities["declared_task_count"] == {split: len(env.tasks(split)) for split in env.splits}


def test_its_client_plays_what_its_server_serves(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "uvicorn", "server.app:app", "--port", str(port)]
    server = subprocess.Popen(serve, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        for _ in range(900):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            time.sleep(0.1)
        played = subprocess.run(
            [CLIENTS / "python", SCRIPTS / "openenv_client.py", f"http://127.0.0.1:{port}"],
            env={**os.environ, "PYTHONPATH": str(folder.parent)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        server.terminate()
        server.wait(20)
    assert played.returncode == 0, played.stderr
    (prompt, reward, done) = json.loads(played.stdout)
    assert prompt == make("Calculator-v0", **KWARGS).tasks("train")[1].prompt[-1].text
    assert (reward, done) == (0.0, True)
