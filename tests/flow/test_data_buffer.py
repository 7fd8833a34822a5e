"""A run with a data buffer trains on groups of earlier batches once more, and resumes with them."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.records import reconcile
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import journal_of, metrics_of, tokens_of, train
from tests.flow.test_replay import replay_of
from tests.flow.test_resume import SMALL, accounted, facts_of, weights_of

BUFFER = {
    **SMALL,
    "num_rollout": 4,
    "save_interval": 1,
    "data_buffer_size": 3,
    "data_buffer_groups": 2,
    "correction": "tis",
}


@pytest.fixture
def updates(monkeypatch):
    """The tokens of each sample of each update, and their logprobs of the engine."""
    seen, update = [], RankTrainer.update

    async def noted(trainer, batch):
        seen.append([(s.token_ids.tolist(), s.logprobs.tolist()) for s in batch.samples])
        return await update(trainer, batch)

    monkeypatch.setattr(RankTrainer, "update", noted)
    return seen


def groups_in(folder, step):
    """The trained groups of a step in the journal: by name, the tokens of their episodes."""
    groups = {}
    for entry in journal_of(folder, f"step_{step:06d}*"):
        if entry["outcome"] == "trained":
            tokens = [token for part in tokens_of(entry) for token in part]
            groups.setdefault(entry["episode"]["id"].split("-")[0], []).append(tokens)
    return groups


def buffered(folder, *, size, number):
    """What each step has to train on, by hand: its own groups, and the oldest that were kept."""
    kept, expected = [], []
    for step in range(1, 5):
        own = groups_in(folder, step)
        taken, kept = kept[:number], kept[number:]
        expected.append([*own.values(), *taken])
        kept = [*kept, *own.values()][-size:]
    return expected


def test_each_batch_has_its_own_groups_and_the_oldest_of_the_buffer(tmp_path, updates):
    folder = train("Talkative", tmp_path, "x", **BUFFER).folder
    expected = buffered(folder, size=3, number=2)
    assert [len(step) for step in expected] == [2, 4, 4, 4]
    assert len(updates) == 4
    for seen, groups in zip(updates, expected, strict=True):
        samples = sorted(tokens for tokens, _ in seen)
        assert samples == sorted(tokens for group in groups for tokens in group)
    # A sample of the second update that is of the first batch has the logprobs of then.
    then, now = ({tuple(t): lp for t, lp in seen} for seen in updates[:2])
    both = then.keys() & now.keys()
    assert len(both) > 2
    assert all(then[tokens] == now[tokens] for tokens in both)
    rows = [row for row in metrics_of(folder) if "rollout/data_buffer/groups" in row]
    assert [row["rollout/data_buffer/groups"] for row in rows] == [0.0, 2.0, 2.0, 2.0]
    assert [row["rollout/data_buffer/age"] for row in rows[:2]] == [0.0, 1.0]
    assert [row["rollout/data_buffer/size"] for row in rows] == [2.0, 2.0, 2.0, 2.0]
    # Rewards and counts are of what was played.
    assert all(row["rollout/prompts"] == 2 for row in rows)
    assert accounted(folder).trained == 8
    assert reconcile(folder).problems == ()


def test_a_run_that_resumes_has_the_buffer_that_it_had(tmp_path):
    whole = train("Talkative", tmp_path, "whole", **BUFFER).folder
    half = train("Talkative", tmp_path, "half", **{**BUFFER, "num_rollout": 2}).folder
    agentrl.train(half, resume=True, num_rollout=4, quiet=True)
    assert weights_of(half) == weights_of(whole)
    rl = [[row for row in facts_of(folder) if "rollout/prompts" in row] for folder in (whole, half)]
    assert rl[0] == rl[1]


SEEN = []


def noting(groups):
    """What a post-processing of rewards is called with."""
    SEEN.append([group.id for group in groups])
    return {}


def test_scores_that_a_function_changed_are_changed_once(tmp_path, updates):
    SEEN.clear()
    paths = {"custom_reward_post_process_path": "tests.flow.test_data_buffer:noting"}
    folder = train("Talkative", tmp_path, "x", **BUFFER, **paths).folder
    # The first call tries it out.
    assert SEEN[-4:] == [[*groups_in(folder, step)] for step in range(1, 5)]
    assert len(updates[1]) == 16


def test_a_replay_needs_a_correction_for_what_it_reuses_alone(tmp_path):
    folder = train("Talkative", tmp_path, "x", **BUFFER).folder
    plain = {name: value for name, value in BUFFER.items() if not name.startswith("data_buffer")}
    plain |= {"correction": "none"}
    # What was reused then was trained on once more, not played otherwise.
    assert weights_of(replay_of(folder, "Talkative", tmp_path, "again", plain))
    buffer = {"data_buffer_size": 3, "data_buffer_groups": 2}
    with pytest.raises(agentrl.UserError, match="data_buffer_groups = 2 trains on tokens of older weights"):
        replay_of(folder, "Talkative", tmp_path, "refused", plain, **buffer)
    done = replay_of(folder, "Talkative", tmp_path, "third", plain, **buffer, correction="tis")
    rows = [row for row in metrics_of(done) if "rollout/data_buffer/groups" in row]
    assert [row["rollout/data_buffer/groups"] for row in rows] == [0.0, 2.0, 2.0, 2.0]
    # The same batches, with the same groups once more, teach the same.
    assert weights_of(done) == weights_of(folder)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"correction": "none"},
            r"data_buffer_groups = 2 trains on tokens of older weights, and correction = none",
        ),
        ({"data_buffer_size": 1}, r"data_buffer_size \(1\) must be at least data_buffer_groups \(2\)"),
        ({"data_buffer_groups": 0}, "data_buffer_size has no effect without data_buffer_groups; set it"),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path, settings, sentence):
    with pytest.raises(agentrl.UserError, match=sentence):
        train("Talkative", tmp_path, "x", **{**BUFFER, **settings})
