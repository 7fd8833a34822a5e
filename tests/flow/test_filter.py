"""Dynamic sampling: groups that a filter drops are replaced in the same batch, and accounted for."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.records import reconcile
from agentrl.run.audit import audit
from tests.flow.runs import TINY, journal_of, metrics_of, train

SMALL = {**TINY, "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "eval_episodes": 4}
ZERO_STD = "agentrl.algorithms.filters:zero_std"


def test_every_batch_is_full_of_groups_with_signal(tmp_path):
    folder = train("Scarce", tmp_path, "x", dynamic_sampling_filter_path=ZERO_STD, **SMALL).folder
    books = reconcile(folder)
    assert books.problems == ()
    assert books.trained == 3 * 4 * 4
    assert books.dropped["zero_std"] >= 3 * 4
    rows = [row for row in metrics_of(folder) if "rollout/raw_reward" in row]
    drops = [row["rollout/dynamic_filter/drop_zero_std"] for row in rows]
    assert sum(drops) * 4 == books.dropped["zero_std"]
    # Metrics are of all groups that were played: half of them pay nothing.
    assert all(row["rollout/zero_std/ratio"] > 0.2 for row in rows)
    started = {int(entry["episode"]["id"].split("-")[0][1:]) for entry in journal_of(folder, "step_*")}
    assert started == set(range(len(started)))


def test_without_a_filter_such_groups_are_in_the_batch_and_give_nothing(tmp_path):
    folder = train("Scarce", tmp_path, "x", **SMALL).folder
    books = reconcile(folder)
    assert books.trained < 3 * 4 * 4
    assert books.trained + books.dropped["zero_std"] == 3 * 4 * 4


def test_a_run_goes_on_exactly_where_groups_were_replaced(tmp_path):
    settings = {**SMALL, "dynamic_sampling_filter_path": ZERO_STD, "save_interval": 1}
    through = train("Scarce", tmp_path, "whole", **settings).folder
    train("Scarce", tmp_path, "parts", **{**settings, "num_rollout": 2})
    parts = agentrl.train(tmp_path / "parts", quiet=True, num_rollout=3).folder
    weights = [folder / "checkpoint" / "model.safetensors" for folder in (through, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert reconcile(through) == reconcile(parts)


@pytest.fixture(scope="module")
def over_sampled(tmp_path_factory):
    """Two iterations of batches that take the first groups to end, then a third after a restart."""
    settings = {
        **SMALL,
        "over_sampling_batch_size": 7,
        "dynamic_sampling_filter_path": ZERO_STD,
        "rollout_sample_filter_path": "tests.flow.worlds:every_second",
    }
    place = tmp_path_factory.mktemp("over")
    train("Scarce", place, "x", **{**settings, "num_rollout": 2})
    return agentrl.train(place / "x", quiet=True, num_rollout=3).folder


def test_of_an_over_sampled_run_every_prompt_is_accounted_for(over_sampled):
    found = audit(over_sampled)
    assert found.problems == ()
    assert found.trained == 3 * 4
    assert found.started == found.trained + sum(found.dropped.values())
    assert set(found.dropped) <= {"over_sampled", "zero_std"}
    assert found.dropped["over_sampled"] > 0
    rows = [row for row in metrics_of(over_sampled) if "rollout/prompts" in row]
    assert sum(row["rollout/prompts"] for row in rows) == found.started
    assert sum(row.get("rollout/dropped/over_sampled", 0) for row in rows) == found.dropped["over_sampled"]
    assert all(row["rollout/prompts"] % 7 == 0 for row in rows)


def test_all_that_is_trained_was_sampled_by_the_served_version(over_sampled):
    for step in range(3):
        entries = journal_of(over_sampled, f"step_{step + 1:06}")
        trained = [entry["episode"] for entry in entries if entry["outcome"] == "trained"]
        turns = [turn for e in trained for part in e["trajectories"] for turn in part["turns"]]
        assert {v for turn in turns for v in turn["tokens"]["completion"]["versions"]} == {step}


def test_what_the_sample_filter_takes_out_is_dropped_with_its_reason(over_sampled):
    books = reconcile(over_sampled)
    assert books.problems == ()
    assert books.trained == books.dropped["sample_filter/second"] == 3 * 4 * 2
    rows = [row for row in metrics_of(over_sampled) if "rollout/prompts" in row]
    assert [row["rollout/sample_filter/drop_second"] for row in rows] == [8] * 3


def test_a_choice_among_all_groups_is_made_again_after_a_restart(tmp_path):
    settings = {
        **SMALL,
        "over_sampling_batch_size": 7,
        "buffer_filter_path": "agentrl.algorithms.filters:highest_std",
        "save_interval": 1,
    }
    through = train("Scarce", tmp_path, "whole", **settings).folder
    train("Scarce", tmp_path, "parts", **{**settings, "num_rollout": 2})
    parts = agentrl.train(tmp_path / "parts", quiet=True, num_rollout=3).folder
    weights = [folder / "checkpoint" / "model.safetensors" for folder in (through, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert reconcile(through) == reconcile(parts)
    found = audit(through)
    assert (found.problems, found.started, found.dropped["not_chosen"]) == ((), 21, 9)


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("tests.flow.worlds:nowhere", ConfigError, "nowhere"),
        ("agentrl.algorithms.filters:has_signal", ConfigError, "one word, why a group is dropped"),
        (
            "tests.flow.worlds:drop_all",
            UserError,
            r"8 groups were played for a batch of 4, .* \(hopeless: 8\)",
        ),
        (
            "tests.flow.worlds:drop_with_an_error",
            UserError,
            r"failed on group g\d+ \(KeyError: 'no such key' \(worlds.py, line \d+\)\)",
        ),
    ],
)
def test_a_filter_that_cannot_work_is_named(tmp_path, path, error, sentence):
    with pytest.raises(error, match=sentence):
        train("Scarce", tmp_path, "x", dynamic_sampling_filter_path=path, max_num_gen_batches=2, **SMALL)
