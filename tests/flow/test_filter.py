"""Dynamic sampling: groups that a filter drops are replaced in the same batch, and accounted for."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.observe import reconcile
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
            r"failed on group g\d+ \(KeyError: 'no such key'\)",
        ),
    ],
)
def test_a_filter_that_cannot_work_is_named(tmp_path, path, error, sentence):
    with pytest.raises(error, match=sentence):
        train("Scarce", tmp_path, "x", dynamic_sampling_filter_path=path, max_num_gen_batches=2, **SMALL)
