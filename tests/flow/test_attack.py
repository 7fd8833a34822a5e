"""A model plays beside the strategies of an attack."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import main
from tests.flow.runs import WARM, train

pytestmark = pytest.mark.full


def test_a_model_plays_beside_the_strategies(tmp_path, capsys):
    trained = train("Bandit", tmp_path, "attacker", **WARM, num_rollout=1)
    capsys.readouterr()
    arguments = ["envs", "attack", "tests.flow.worlds:Bandit", "--budget", "80", "--n", "16", "--json"]
    try:
        main([*arguments, "--model", str(trained.folder / "checkpoint")])
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    report = json.loads(capsys.readouterr().out)
    assert code == int(report["paid"] > 0)
    # It has learned from the expert's demonstrations, so it earns more than chance.
    assert report["chance_score"] < report["model"] <= 1.0
