"""Rewards of all kinds, from a world to the journal and the metrics; a broken one is replaced."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agentrl.envs import score
from agentrl.records import Outcome, read_journal, reconcile
from tests.flow.runs import EPISODES_PER_STEP, metrics_of, train
from tests.flow.worlds import Judged


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Two iterations of an untrained model in the judged world."""
    return train("Judged", tmp_path_factory.mktemp("runs"), "judged", num_rollout=2).folder


def test_every_part_is_journalled_and_makes_the_total(judged):
    entries = [e for path in (judged / "trajectories").glob("step_*") for e in read_journal(path)]
    scored = [entry for entry in entries if entry.verdict is not None]
    assert len(scored) == 2 * EPISODES_PER_STEP
    for entry in scored:
        parts = entry.verdict.parts
        assert set(parts) >= {"env", "brief", "ahead"}
        assert entry.verdict.total == pytest.approx(
            parts["env"] + 0.5 * parts["brief"] + 0.1 * parts["ahead"]
        )
        assert parts["env"] == sum(reward or 0.0 for reward in entry.episode.step_rewards)
        assert parts["env"] == parts.get("env/gold", 0.0) + parts.get("env/said", 0.0)


def test_who_could_not_be_judged_was_replaced(judged):
    books = reconcile(judged)
    assert books.problems == ()
    assert books.dropped["reward_error"] > 0
    assert books.trained + books.dropped.get("zero_std", 0) == 2 * EPISODES_PER_STEP


def test_parts_are_metrics(judged):
    names = {name for row in metrics_of(judged) for name in row}
    assert names >= {"rollout/reward/brief/mean", "rollout/reward/ahead/mean", "eval/greedy/reward/brief"}


def test_a_journal_is_scored_again_without_being_touched(judged):
    path = judged / "trajectories" / "step_000001.jsonl.gz"
    before = path.read_bytes()
    entries = list(read_journal(path))
    scored = asyncio.run(score([entry.episode for entry in entries], Judged.rewards[1:]))
    assert path.read_bytes() == before
    old = {entry.episode.id: entry.verdict for entry in entries if entry.outcome is not Outcome.DROPPED}
    new = {verdict.episode_id: verdict for verdict in scored.verdicts}
    assert old.keys() <= new.keys()
    assert Counter(round(new[id].parts["ahead"] - old[id].parts["ahead"], 9) for id in old) == {0.0: len(old)}
