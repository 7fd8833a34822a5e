"""Shared resources of tools may outlive an episode, but not the check."""

from __future__ import annotations

import pytest

from agentrl.envs.check import check_env
from agentrl.envs.check.probes import cost_probe
from tests.envs.check import sharing
from tests.envs.check.sharing import Forgotten, ForgottenShared, Kept, KeptShared
from tests.tools.mcp.watching import alive, servers


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.setattr("agentrl.envs.check.traces._MAX_POLLS", 5)
    monkeypatch.setattr(cost_probe, "_EPISODES", 4)
    yield
    for child in sharing.FORGOTTEN:
        sharing.end(child)
    sharing.FORGOTTEN.clear()


@pytest.mark.parametrize("env", [Kept, KeptShared])
def test_a_world_that_closes_what_it_opens_has_no_errors_and_leaves_nothing(env):
    before = servers()
    report = check_env(env, n=2)
    assert report.errors == ()
    assert servers() - before == set()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [(Forgotten, "an episode cancelled at"), (ForgottenShared, "after what their tools share was closed")],
)
def test_a_leaked_child_process_is_found(env, sentence):
    report = check_env(env, n=2)
    assert {finding.code for finding in report.errors} == {"leaves-process"}
    assert sentence in report.errors[0].text
    assert any(alive(child.pid) for child in sharing.FORGOTTEN)
