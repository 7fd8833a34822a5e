"""The evaluation of verifiers 0.4 plays exported packages; in an environment of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from agentrl.envs.export import export_env
from tests.house.source import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]

PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the script prints, as JSON."""
    assert PYTHON.exists(), "make .venv-verifiers/.installed makes the environment of verifiers 0.4"
    folder = tmp_path_factory.mktemp("tasksets")
    folders = [folder / env_id for env_id in ("HopSearch-v0", "CalendarQuestions-v0", "Wordle-v0")]
    for each in folders:
        export_env(each.name, {}, "verifiers", each)
    own = shlex.split(os.environ.get("PIP_ARGS", ""))
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "site", *own]
    subprocess.run([*install, *folders], check=True, timeout=600)
    (folder / "out").mkdir()
    done = subprocess.run(
        [PYTHON, SCRIPTS / "evaluated.py", folder / "out"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SCRIPTS, folder / "site")))},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("env_id", ["HopSearch-v0", "CalendarQuestions-v0", "Wordle-v0"])
def test_it_scores_experts_1_and_others_0_as_the_episodes_here_are_scored(found, env_id):
    expert, wrong = found["pairs"][env_id]
    for (theirs, ours), reward in ((expert, 1.0), (wrong, 0.0)):
        told = [{name: row[name] for name in ("task", "reward", "parts")} for row in theirs]
        assert told == ours
        assert [row["reward"] for row in theirs] == [reward] * len(ours)
        assert all(row["errors"] == [] for row in theirs)
    if env_id == "HopSearch-v0":
        assert all(row["roles"][:3] == ["user", "assistant", "tool"] for row in expert[0])
    if env_id == "Wordle-v0":
        # Six guesses, each answered but for the last.
        assert wrong[0][0]["roles"] == ["user", "assistant"] * 6


def test_a_limit_of_verifiers_cuts_an_episode_which_is_scored_as_it_is(found):
    for kind, stop in (("turns", "max_turns"), ("deadline", "agent_timeout")):
        (row,) = found[kind]
        assert (row["reward"], row["stop"], row["errors"]) == (0.0, stop, [])
        assert row["parts"]["invalid_moves"] == 2.0


def test_what_fails_is_an_error_and_no_reward_of_0(found):
    for kind, stop, says in (
        ("broken", "harness_error", "the world is gone"),
        ("refused", "provider_error", "upstream 400"),
    ):
        (row,) = found[kind]
        assert (row["reward"], row["stop"]) == (None, stop)
        assert says in row["errors"][-1]
    assert "leave the harness to the package" in found["unplayed"]
    assert "leave system_prompt out" in found["prompted"]


def test_its_server_plays_the_tasks_that_a_trainer_sends(found):
    assert found["served"] == [1.0, 1.0]


def test_arguments_of_the_environment_are_taken_at_its_evaluation(found):
    (row,) = found["few words"]
    assert row["reward"] == 1.0


def test_calls_and_images_of_a_first_observation_reach_the_model(found):
    (row,), (asked,) = found["shown"]
    assert (row["reward"], row["roles"]) == (1.0, ["system", "assistant", "tool", "user", "assistant"])
    assert [message["role"] for message in asked] == ["system", "assistant", "tool", "user"]
    assert asked[1]["tool_calls"][0]["function"]["name"] == "look"
    assert asked[3]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
