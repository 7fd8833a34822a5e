"""OpenEnv's own server is played by our client, and its own clients play an environment served here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from agentrl import ScriptedAgent, call, play
from agentrl.envs.openenv import OpenEnv, client
from agentrl.envs.openenv.config import ENV_KEY
from envs_contrib.calculator import Calculator
from tests.envs.openenv.test_client import solves_refuses_and_fails
from tests.house.source import ROOT

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
KEY = "a-key-of-these-tests"
TASKS = Calculator().tasks("train")[:8]


@contextlib.contextmanager
def real_server(kind, places):
    """The address of a server of OpenEnv."""
    assert PYTHON.exists(), "make .venv-clients/.installed makes the environment of OpenEnv"
    client._forms.clear()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([PYTHON, SCRIPTS / "server.py", kind, str(port), str(places)])
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(900):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


async def test_a_real_server_is_played():
    with real_server("guess", 8) as url:
        await solves_refuses_and_fails(url)


async def test_the_tools_of_a_real_server_are_tools_of_the_episode_and_a_full_one_is_waited_for():
    def script():
        assert "Error: " in (yield call("add", a="many", b=1))
        yield call("add", a=2, b=5)

    async def played(url):
        env = OpenEnv(url)
        episode = await play(env, ScriptedAgent(script()), env.tasks("train")[7])
        return episode, env

    with real_server("tools", 2) as url:
        for episode, env in await asyncio.gather(*(played(url) for _ in range(5))):
            assert (episode.ending, episode.total_of()) == ("completed", 1.0), episode.failure
            (add,) = env.tool_schemas
            assert (add.name, add.description) == ("add", "Add two numbers.")
            assert set(add.parameters["properties"]) == {"a", "b"}
            assert "Make 7." in episode.turns[0].observation[-1].text


def expressions(task):
    """What its expert computes."""
    script = Calculator().expert(task)
    action, said = next(script), []
    while action.tool_calls:
        said.append(action.tool_calls[0].arguments["expression"])
        action = script.send(str(eval(said[-1])))
    return said


@contextlib.contextmanager
def served_calculator():
    """Runs a script against a served Calculator, with the expressions of eight tasks; what it prints."""
    command = [sys.executable, "-m", "agentrl.cli", "serve-env", "Calculator-v0", "--port", "0", "--json"]
    environment = {**os.environ, ENV_KEY: KEY}
    server = subprocess.Popen([*command, "--max-sessions", "4"], stdout=subprocess.PIPE, env=environment)

    def run(script):
        done = subprocess.run(
            [PYTHON, SCRIPTS / script, url, KEY],
            input=json.dumps([expressions(task) for task in TASKS]) + "\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    try:
        url = json.loads(server.stdout.readline())["url"]
        yield run
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def test_the_clients_of_openenv_and_its_rollouts_for_trl_play_the_expert_of_a_served_environment():
    with served_calculator() as run:
        found = run("client.py")
        steps = [len(expressions(task)) + 1 for task in TASKS]
        assert found["played"] == [[[1.0, True, number]] * 2 for number in steps]
        assert "401" in found["refused"]
        assert [("CAPACITY_REACHED" in each) for each in found["full"]] == [False] * 4 + [True]
        assert run("trl_rollouts.py") == {"rewards": [1.0] * 8, "turns": steps}
