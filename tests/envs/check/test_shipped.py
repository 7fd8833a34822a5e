"""Every environment that is installed passes its own check."""

from __future__ import annotations

import pytest

from agentrl import env_ids
from agentrl.envs.check import check_env

EXPENSIVE = {"Taxi-v0", "CliffWalking-v0", "FrozenLake-v0"}
"""Ids whose check takes longer than a few seconds."""


def cases():
    return [pytest.param(id, marks=pytest.mark.full if id in EXPENSIVE else ()) for id in env_ids()]


@pytest.mark.parametrize("env_id", cases())
def test_a_shipped_environment_passes_its_check(env_id):
    report = check_env(env_id, n=8)
    assert report.ok, str(report)
