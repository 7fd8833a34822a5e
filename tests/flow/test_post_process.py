"""A function that changes the scores of a batch trains as a world does that pays these."""

from __future__ import annotations

from tests.flow.runs import WARM, journal_of, metrics_of, train
from tests.flow.test_replay import SMALL as REPLAYED
from tests.flow.test_replay import replay_of, weights_of

SMALL = {**REPLAYED, "num_rollout": 2, **WARM, "warm_start_steps": 10, "num_demonstrations": 32}
MIRROR = {"custom_reward_post_process_path": "tests.flow.worlds:mirrored"}


def test_the_weights_are_those_of_a_world_that_pays_so_and_the_journal_has_both_scores(tmp_path):
    pays = train("MirroredBandit", tmp_path, "pays", **SMALL).folder
    changed = train("Bandit", tmp_path, "changed", **SMALL, **MIRROR).folder
    plain = train("Bandit", tmp_path, "plain", **SMALL).folder
    assert weights_of(changed) == weights_of(pays) != weights_of(plain)

    first, paid, raw = (
        next(row for row in metrics_of(folder) if "train/optimizer_steps" in row)
        for folder in (changed, pays, plain)
    )
    # Both have played the first batch by the same weights.
    assert first["rollout/raw_reward"] == raw["rollout/raw_reward"]
    assert first["rollout/rewards"] == paid["rollout/raw_reward"] != raw["rollout/raw_reward"]
    assert "rollout/rewards" not in raw
    entries = journal_of(changed, "step_*")
    verdicts = [entry["verdicts"][0] for entry in entries if entry["episode"]["ending"] == "completed"]
    assert verdicts
    for verdict in verdicts:
        before = verdict["parts"]["before_post_process"]
        assert (verdict["parts"]["env"], verdict["total"]) == (before, 3.0 - 2.0 * before)

    again = replay_of(changed, "Bandit", tmp_path, "again", SMALL)
    assert weights_of(again) == weights_of(changed)
