"""Every environment that is installed passes its own check."""

from __future__ import annotations

import pytest

from agentrl import env_ids, make
from agentrl.envs.check import check_env

EXPENSIVE = {
    *("Taxi-v0", "CliffWalking-v0", "FrozenLake-v0"),
    *("AgentDojoSlack-v0", "AgentDojoTravel-v0", "AgentDojoWorkspace-v0"),
    *("ReTool-v0", "Sql-v0", "Terminal-v0"),
}
"""Ids whose check takes longer than a few seconds."""
MANY_ALIKE = "ReasoningGym-"
"""A family of generators behind one class: one of them is enough for the quick tests."""


def cases():
    alike = [id for id in env_ids() if id.startswith(MANY_ALIKE)][1:]
    return [
        pytest.param(id, marks=pytest.mark.full if id in {*EXPENSIVE, *alike} else ())
        for id in env_ids()
        if make(id).splits
    ]


@pytest.mark.parametrize("env_id", cases())
def test_a_shipped_environment_passes_its_check(env_id):
    report = check_env(env_id, n=8)
    assert report.ok, str(report)


def test_an_environment_without_tasks_of_its_own_says_so():
    assert check_env("SingleTurn-v0").codes == ("no-tasks",)
