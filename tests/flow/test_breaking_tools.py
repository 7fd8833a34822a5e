"""A policy may choose to break the tool: hang it, crash it, flood it, or overrun the step. It never pays, so
it is unlearned."""

from __future__ import annotations

import pytest

from agentrl.records import reconcile
from tests.flow.runs import WARM, journal_of, metrics_of, train

pytestmark = pytest.mark.learning
STEPS = 10


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A policy that was taught to break the tool in two episodes of three."""
    warm = {**WARM, "warm_start_steps": 60, "num_demonstrations": 96}
    return train("Coder", tmp_path_factory.mktemp("runs"), "coder", num_rollout=STEPS, **warm)


def broken(folder):
    """How many calls an episode broke the tool, by iteration; errors in code do not."""
    kinds = ("timeout", "cpu", "memory", "processes", "signal")
    rows = [row for row in metrics_of(folder) if "rollout/raw_reward" in row]
    return [sum(row.get(f"rollout/tool/python/rejected/{kind}/mean", 0.0) for kind in kinds) for row in rows]


def test_breaking_the_tool_is_unlearned(run):
    shares = broken(run.folder)
    assert len(shares) == STEPS
    assert shares[0] > 0.12
    assert max(shares[-3:]) < 0.04


def test_what_broke_the_tool_was_scored_and_nothing_was_replaced(run):
    books = reconcile(run.folder)
    assert books.problems == ()
    assert books.played == books.trained + sum(books.dropped.values())
    assert set(books.dropped) <= {"zero_std"}
    first = journal_of(run.folder, "step_000001")
    assert all("failure" not in entry["episode"] for entry in first)
    rejected = [entry["episode"].get("tools", {}).get("python", {}).get("rejected", {}) for entry in first]
    breaking = [entry for entry, kinds in zip(first, rejected, strict=True) if "timeout" in kinds]
    assert breaking
    assert {entry["verdicts"][0]["total"] for entry in breaking} == {0.0}


def test_overrunning_the_step_is_unlearned_and_nothing_was_replaced(tmp_path):
    """The policy was taught to overrun in seven episodes of ten."""
    folder = train("Hasty", tmp_path, "hasty", num_rollout=STEPS, rollout_max_context_len=128, **WARM).folder
    rows = [row for row in metrics_of(folder) if "rollout/raw_reward" in row]
    shares = [row["rollout/tool_timeouts/mean"] for row in rows]
    assert shares[0] > 0.4
    assert max(shares[-3:]) < 0.1
    assert [row["rollout/failed_episodes"] for row in rows] == [0] * STEPS
    assert set(reconcile(folder).dropped) <= {"zero_std"}
