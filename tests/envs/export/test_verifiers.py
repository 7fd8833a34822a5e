"""verifiers 0.3 plays exported environments, and its own are played here; in an environment of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from agentrl.envs.export import export_env
from tests.house.source import ROOT

pytestmark = pytest.mark.full

PYTHON = ROOT / ".venv-verifiers-03" / "bin" / "python"
SCRIPTS = Path(__file__).parent / "scripts"


def printed(script, *arguments):
    """What a script prints, as JSON."""
    assert PYTHON.exists(), "make .venv-verifiers-03/.installed makes the environment of verifiers"
    done = subprocess.run(
        [PYTHON, SCRIPTS / script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPTS)])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1000)
def test_verifiers_plays_the_packages_with_its_own_loop_and_scores_experts_1_and_others_0(tmp_path):
    folders = [tmp_path / env_id for env_id in ("HopSearch-v0", "Wordle-v0")]
    for folder in folders:
        export_env(folder.name, {}, "verifiers", folder)
    own = shlex.split(os.environ.get("PIP_ARGS", ""))
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", *own]
    subprocess.run([*install, *folders], check=True, timeout=600)
    found = printed("exported.py", tmp_path / "site")
    assert found["expert"] == [1.0] * 4
    assert found["wrong"] == [0.0] * 4
    for reward, parts, truncated, error, _ in found["games"]:
        assert (reward, parts["env"], parts["solved"], truncated, error) == (1.0, 1.0, 1.0, False, None)
    # Six guesses, each answered but for the last.
    reward, parts, _, error, said = found["lost"]
    assert (reward, parts["invalid_moves"], error) == (0.0, 6.0, None)
    assert said == ["assistant", "user"] * 5 + ["assistant"]
    reward, _, truncated, error, said = found["cut"]
    assert (reward, truncated, error, said) == (0.0, True, None, ["assistant"])
    # A world that fails is verifiers' error of its kind, and no episode of reward 0.
    assert found["failed"][3] == "InfraError"


@pytest.mark.timeout(1000)
def test_environments_of_every_kind_score_as_verifiers_itself_scores_the_same_conversation():
    all_found = printed("imported.py")
    found = all_found["found"]
    lost = found.pop("lost")
    for kind, pairs in found.items():
        for theirs, ours in pairs:
            assert ours[0] == pytest.approx(theirs[0]), kind
            assert ours[1] == pytest.approx(theirs[1]), kind
            assert ours[2] == theirs[2], kind
    assert [[ours[0] for _, ours in pairs] for pairs in found.values()] == [
        [pytest.approx(1 + 0.25 / 3), 0.25 / 4],
        [pytest.approx(1.125), pytest.approx(0.25 / 3)],
        [1.0, 0.0],
        [1.0, 0.0],
    ]
    ((_, (failure, _, _)),) = lost
    assert "ToolCallError" in failure
    assert all_found["sizes"] == [[2, 1], [3, 3]]
    assert all_found["tokens"] == pytest.approx(1.125)
    assert "cannot load the environment `nowhere`" in all_found["refusals"][0]
    assert "compares rollouts" in all_found["refusals"][1]
