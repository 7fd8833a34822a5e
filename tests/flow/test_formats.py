"""A journal that went out as ATIF and came back trains the same weights, bit for bit."""

from __future__ import annotations

import gzip
import json

import pytest

import agentrl
from agentrl.algorithms.samples import samples_of
from agentrl.cli import main
from agentrl.records import read_journal
from agentrl.run.journal_entries import groups_of_step
from tests.flow.runs import journal_of, train
from tests.flow.test_replay import PATCHY, SMALL, learned, replay_of, weights_of

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with failed episodes, dropped groups and two optimizer steps a batch."""
    return train("Patchy", tmp_path_factory.mktemp("runs"), "original", **PATCHY).folder


@pytest.fixture(scope="module")
def back(original, tmp_path_factory):
    """Its journal, out as documents of ATIF and in again."""
    folder = tmp_path_factory.mktemp("atif")
    main(["export", str(original), "--format", "atif", "--out", str(folder / "documents")])
    main(["import", str(folder / "documents"), "--out", str(folder / "back")])
    return folder / "back"


def test_the_journal_is_the_same(original, back):
    assert journal_of(back) == journal_of(original)


def test_its_batches_are_the_same_bit_for_bit(original, back):
    names = ("token_ids", "loss_mask", "author", "logprobs", "versions", "temperatures", "turns")

    def batch(folder, step):
        groups = groups_of_step(folder, step)
        samples = [sample for group in groups for episode in group.episodes for sample in samples_of(episode)]
        arrays = [getattr(sample, name) for sample in samples for name in names]
        return [group.verdicts for group in groups], [(array.dtype, array.tobytes()) for array in arrays]

    for step in (1, 2, 3):
        assert batch(back, step) == batch(original, step)
        assert batch(original, step)[1]


def test_a_training_on_it_ends_with_the_same_weights(original, back, tmp_path):
    played = replay_of(original, "Patchy", tmp_path, "played", PATCHY)
    imported = replay_of(back, "Patchy", tmp_path, "imported", PATCHY)
    assert weights_of(imported) == weights_of(played) == weights_of(original)
    assert learned(imported) == learned(played)


def test_a_changed_logprob_changes_the_weights(original, tmp_path):
    """So the logprobs of the documents are what is trained on, and not a copy of the journal beside them."""
    main(["export", str(original), "--format", "atif", "--out", str(tmp_path / "x.jsonl.gz")])
    with gzip.open(tmp_path / "x.jsonl.gz", "rt") as file:
        documents = [json.loads(line) for line in file]
    for step in (step for document in documents for step in document["steps"]):
        if "metrics" in step:
            step["metrics"]["logprobs"] = [x - 0.25 for x in step["metrics"]["logprobs"]]
    (tmp_path / "y.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    config = ["--config", str(original / "config.toml")]
    main(["import", str(tmp_path / "y.jsonl"), "--out", str(tmp_path / "back"), *config])
    changed = replay_of(tmp_path / "back", "Patchy", tmp_path, "changed", PATCHY)
    assert weights_of(changed) != weights_of(original)


def test_the_other_commands_take_it(back, capsys):
    main(["view", str(back), "--json"])
    number = json.loads(capsys.readouterr().out)["num_episodes"]
    assert number == len(journal_of(back))
    main(["rescore", str(back), "--reward", "f1", "--step-rewards", "drop", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"][0]["rollouts"] > 0
    first = next(read_journal(back / "trajectories" / "step_000001.jsonl.gz"))
    assert isinstance(first.start_version, int)


def test_supervised_fine_tuning_takes_it_with_the_name_of_the_model(tmp_path):
    original = train("Bandit", tmp_path, "bandit", **{**SMALL, "num_rollout": 1}).folder
    model = original / "checkpoint"
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[env]\nenv = "tests.flow.worlds:Bandit"\n[model]\nhf_checkpoint = "{model}"\n')
    main(["export", str(original), "--format", "atif", "--out", str(tmp_path / "x")])
    out = str(tmp_path / "back")
    main(["import", str(tmp_path / "x"), "--out", out, "--config", str(run_file)])
    settings = {"sft_data": out, "hf_checkpoint": str(model), "sft_batch_size": 16, "num_epoch": 1}
    fixed = {"output_dir": str(tmp_path), "name": "x", "inline": True, "use_tensorboard": False}
    assert agentrl.sft(**settings, **fixed, quiet=True).folder.is_dir()
