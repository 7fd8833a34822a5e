"""Every environment that is installed passes its own check."""

from __future__ import annotations

import pytest

from agentrl import env_ids, make
from agentrl.envs.check import check_env
from agentrl.envs.registry import families

EXPENSIVE = {
    *("Taxi-v0", "CliffWalking-v0", "FrozenLake-v0"),
    *("AgentDojoBanking-v0", "AgentDojoTravel-v0", "AgentDojoWorkspace-v0"),
    *("AgentDojoSlack-v0", "TicTacToe-v0"),
    *("Tau2Airline-v0", "Tau2Retail-v0", "BFCLLongContext-v0"),
    *("Repositories-v0", "ReTool-v0", "Sokoban-v0", "Sql-v0", "Terminal-v0", "Wordle-v0"),
    # The quick tests of games between agents check these.
    *("RockPaperScissors-v0", "SolverCritic-v0"),
}
"""Ids whose check takes longer than a few seconds."""
QUICK = {"ReasoningGym-gcd-v0", "BabyAI-GoToObj-v0", "TextArena-GuessTheNumber-v0"}
"""Of each family, many environments of one class, one is enough for the quick tests."""


MEMBERS = {id for family in families().values() for id in family} - QUICK


def cases():
    return [
        pytest.param(id, marks=pytest.mark.full if id in EXPENSIVE | MEMBERS else ())
        for id in env_ids()
        if make(id).splits
    ]


@pytest.mark.parametrize("env_id", cases())
def test_a_shipped_environment_passes_its_check(env_id):
    # The probes of a class see most of what there is to see in the first of its family.
    report = check_env(env_id, n=3 if env_id in MEMBERS else 8)
    assert report.ok, str(report)


def test_an_environment_without_tasks_of_its_own_says_so():
    assert check_env("SingleTurn-v0").codes == ("no-tasks",)
