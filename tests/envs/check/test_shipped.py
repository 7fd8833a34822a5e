"""Every environment that is installed passes its own check."""

from __future__ import annotations

import re

import pytest

from agentrl import env_ids, make
from agentrl.envs.check import check_env
from agentrl.envs.registry import families
from tests.house.source import ROOT

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


def test_the_guides_count_the_policies_of_a_check():
    """Fewest in a world whose tasks have no answer, most in one with answers and tools."""
    least, most = (int(check_env(id, n=4).figures["policies"]) for id in ("Blackjack-v0", "Calculator-v0"))
    told = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"It plays (\d+) to (\d+) policies", told) == [(str(least), str(most))]
    # All but chance, and silence of two kinds, are cheats.
    assert 24 - 4 < least - 3 < most - 3 < 24 + 4
    pages = {page.name: page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")}
    counts = {
        (name, count) for name, text in pages.items() for count in re.findall(r"(\w+ \w+) cheats", text)
    }
    assert {count for _, count in counts if "dozen" in count or "thirty" in count} == {"two dozen"}
    assert len([name for name, count in counts if count == "two dozen"]) == 4


def test_an_environment_without_tasks_of_its_own_says_so():
    assert check_env("SingleTurn-v0").codes == ("no-tasks",)
