"""openreward's own client plays exported servers over HTTP; in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from agentrl import make
from agentrl.envs.export import export_env
from tests.house.source import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

PYTHON = ROOT / ".venv-openreward" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"
ENV_IDS = ("HopSearch-v0", "CalendarQuestions-v0", "Wordle-v0")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the script prints, as JSON."""
    assert PYTHON.exists(), "make .venv-openreward/.installed makes the environment of openreward"
    folder = tmp_path_factory.mktemp("ors")
    for env_id in ENV_IDS:
        export_env(env_id, {}, "ors", folder / env_id)
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPTS)]), "OPENREWARD_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [PYTHON, SCRIPTS / "ors_client.py", *(folder / env_id for env_id in ENV_IDS)],
        env={**os.environ, **own},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_it_lists_and_scores_what_the_environment_has(found, env_id):
    told, env = found[env_id], make(env_id)
    assert (told["splits"], told["tasks"]) == (True, True)
    tools = [[tool.name, dict(tool.parameters)] for tool in env.tool_schemas]
    if env_id == "Wordle-v0":
        ((name, schema),) = told["tools"]
        assert (name, list(schema["properties"]), told["final"]) == ("say", ["message"], False)
    else:
        assert (told["tools"], told["final"]) == (tools, True)
    for pair in told["pairs"]:
        assert pair["theirs"] == pair["ours"]
        assert pair["prompt"]
    assert [pair["theirs"][0] for pair in told["pairs"]] == [1.0, 0.0] * 2


def test_what_fails_is_an_error_and_no_reward_of_0(found):
    assert "the world is gone" in found["failing"]
    for env_id in ENV_IDS:
        assert "422" in found[env_id]["refused"]
        assert "nowhere" in found[env_id]["unknown"]


def test_calls_at_the_same_time_are_turns_one_after_another(found):
    texts, reward = found["at once"]
    assert texts == ["dark", "quiet", "cold", "listen", "look", "touch"]
    assert reward == 1.0


def test_calls_and_images_of_a_first_observation_reach_the_client(found):
    messages, reward = found["shown"]
    assert [message["role"] for message in messages] == ["system", "assistant", "tool", "user"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "look"
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert messages[3]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert reward == 1.0
