"""The same agent in other forms: chat instead of tags, and a prefix that has to begin anew."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.records import reconcile
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, tokens_of, train

# JSON takes a small model longer to write than tags, and larger steps make it forget how.
PATIENT = {**WARM, "warm_start_steps": 150, "rollout_max_context_len": 512, "lr": 1e-3}


@pytest.mark.learning
def test_an_agent_learns_in_the_chat_dialect_and_is_evaluated_in_it(tmp_path):
    run = train("Bandit", tmp_path, "chat", dialect="chat", num_rollout=30, **PATIENT)
    rewards = [row["rollout/raw_reward"] for row in metrics_of(run.folder) if "rollout/raw_reward" in row]
    assert max(rewards[:2]) < 0.7 < rewards[-1]
    assert reconcile(run.folder).problems == ()
    entry = journal_of(run.folder, "step_*")[-1]
    action = entry["episode"]["trajectories"][0]["turns"][0]["action"]
    assert action["tool_calls"][0]["raw"].startswith('{"name": "press"')
    greedy = {"n": 32, "dialect": "chat", "temperature": 0.0, "rollout_max_context_len": 512}
    report = agentrl.evaluate("tests.flow.worlds:Bandit", run.folder / "checkpoint", quiet=True, **greedy)
    assert report.mean > 0.9
    assert report.turns == 2.0


def test_an_agent_learns_from_episodes_of_several_trajectories(tmp_path):
    run = train("Forgetful", tmp_path, "forgetful", num_rollout=8, **WARM)
    rows = [row for row in metrics_of(run.folder) if "rollout/raw_reward" in row]
    assert rows[-1]["rollout/raw_reward"] > 0.7 > rows[0]["rollout/raw_reward"]
    assert rows[-1]["rollout/restarts/compacted"] > TINY["rollout_batch_size"]
    books = reconcile(run.folder)
    assert books.problems == ()
    for entry in journal_of(run.folder, "step_*"):
        first, *others = entry["episode"]["trajectories"]
        assert "reason" not in first
        assert [(trajectory["parent"], trajectory["reason"]) for trajectory in others] == [
            (index, "compacted") for index in range(len(others))
        ]
        assert all(len(trajectory["turns"]) == 1 for trajectory in (first, *others))
        assert len(tokens_of(entry)) == 2 * (1 + len(others))
