"""docs/reports.md has a row of each environment that ships, and none says that cheating pays."""

from __future__ import annotations

import re

import pytest

from agentrl.envs.registry import env_ids, find
from tests.docs.blocks import ROOT
from tests.docs.reports import rows

ROWS = rows()
WITHOUT_TASKS = {"SingleTurn-v0", "Tools-v0"}
"""A run brings theirs."""


def test_there_is_a_row_of_each_environment_that_ships():
    ours = ("agentrl.", "envs_contrib.")
    shipped = {id for id in env_ids() if find(id).env_class.__module__.startswith(ours)}
    assert set(ROWS) == shipped - WITHOUT_TASKS


@pytest.mark.parametrize("env_id", ROWS)
def test_a_row_says_that_the_expert_earns_what_no_cheat_does(env_id):
    findings, rfc, expert, chance, cheats, attack, strategy, played = ROWS[env_id]
    explained = (ROOT / "docs" / "write-an-environment.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in explained for code in re.findall(r"`([\w-]+)`", findings))
    assert re.fullmatch(r"\d+ of 34", rfc)
    assert re.fullmatch(r"2\d{3}-\d{2}-\d{2}", played)
    assert "**paid**" not in strategy
    env_class = find(env_id).env_class
    if expert:
        assert float(expert) == pytest.approx(env_class.expert_score, abs=0.1)
        # That of cheats is of few tasks: luck alone may win a game of chance.
        assert max(float(score) for score in (chance, attack) if score) < float(expert)
        assert not cheats or float(cheats) < float(expert) + 0.1
