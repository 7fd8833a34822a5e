"""Ranks on two machines of a cluster, each a network namespace with a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes.machines import FAR, NAMESPACES, NEAR

ROOT = Path(__file__).parents[2]


def run(
    scenario: str, folder: Path, module: str = "on_two_machines", more: Sequence[str] = ()
) -> dict[str, object]:
    """The result of a scenario of a module, in namespaces of its own. more: of them, for `unshare`."""
    command = [sys.executable, "-m", f"{__package__}.{module}", scenario, str(folder)]
    done = subprocess.run(
        [*NAMESPACES, *more, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.full
def test_ranks_on_two_machines_learn_bit_for_bit_what_ranks_of_one_learn(tmp_path):
    assert run("same", tmp_path) == {"same": True, "logs": ["rank-0.log", "rank-1.log"]}


@pytest.mark.full
def test_a_server_of_another_machine_gets_its_weights_from_the_rank(tmp_path):
    result = run("weights", tmp_path)
    assert str(result.pop("url")).partition("//")[2].startswith("10.231.0.2:")
    assert result == {"versions": [1], "rank": "10.231.0.1", "server": "10.231.0.2"}


@pytest.mark.full
def test_a_server_over_both_machines_serves_the_weights_of_a_rank(tmp_path):
    assert run("wide", tmp_path) == {"versions": [1], "parts": [NEAR, FAR]}


@pytest.mark.full
def test_a_player_of_another_machine_sends_its_requests_to_the_servers_itself(tmp_path):
    assert run("requests", tmp_path) == {
        "iterations": 3,
        "restarts": 0,
        "problems": [],
        "through the driver": 0,
        "player": "10.231.0.2",
        "server": "10.231.0.1",
    }


@pytest.mark.faults
def test_a_machine_that_is_lost_in_mid_call_is_named_and_ends_the_other_rank(tmp_path):
    message = str(run("lost", tmp_path)["message"])
    assert message.startswith("rank 1 of the trainer (process ")
    assert " on 10.231.0.2) has gone with its machine; the others were ended, too (see " in message


@pytest.mark.faults
def test_the_groups_of_a_machine_that_is_lost_are_played_by_players_of_others(tmp_path):
    result = run("players_lost", tmp_path)
    assert result["groups"] == ["g0", "g1", "g2", "g3"]
    # Two groups of two episodes were there.
    assert result["cancelled"] == 4
    (line,) = result["lines"]
    assert " on 10.231.0.2) has gone with its machine; groups g1, g3 are played again (see " in line


@pytest.mark.faults
@pytest.mark.parametrize("loss", ["killed", "cut_off"])
def test_a_run_whose_machine_is_lost_in_mid_update_resumes_by_itself_on_another(tmp_path, loss):
    result = run(loss, tmp_path, "runs_on_two_machines")
    (before,), after, shown = result["before"], result["after"], str(result["shown"])
    where = {name: place.rpartition(" ")[2] for name, place in before.items()}
    assert {where[name] for name in ("rank 0", "player 0", "player 1")} == {FAR}
    assert {after[name].rpartition(" ")[2] for name in ("rank 0", "player 0", "player 1")} == {NEAR}
    # The checkpoint of the step before may still have been on its way to the disk.
    assert result["attempts"] in ([["failed", None], ["finished", step]] for step in (1, 2))
    assert result["problems"] == []
    assert result["trained"] > 0
    assert f"rank 0 of the trainer ({before['rank 0']}) has gone with its machine; the others were" in shown
    assert shown.count("The run resumes by itself (1 of 1).") == 1
    # Ray would print the log of its own process there.
    assert "raylet" not in shown
