"""A run that samples with top-p trains on the distribution that it sampled."""

from __future__ import annotations

import gzip
import json
import math
import shutil

import pytest

import agentrl
from tests.flow.runs import TINY, journal_of, metrics_of, train

SETTINGS = {
    **TINY,
    "num_rollout": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "use_tensorboard": False,
    "rollout_top_p": 0.9,
    "rollout_temperature": 0.8,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
}
OF_PLAYING = ("rollout_batch_size", "n_samples_per_prompt", "rollout_top_p", "rollout_temperature")
OF_ENGINES = ("eval_episodes", "eval_interval", "max_slots")


def steps_of(folder):
    return [row for row in metrics_of(folder) if "train/loss" in row]


def completions_of(folder):
    return [
        turn["tokens"]["completion"]
        for entry in journal_of(folder, "step_*")
        for trajectory in entry["episode"]["trajectories"]
        for turn in trajectory["turns"]
        if turn["tokens"]["completion"]["token_ids"]
    ]


def replayed(folder, output_dir, name):
    """The run that trains on the journal in a folder."""
    acting = {key: value for key, value in SETTINGS.items() if key not in (*OF_PLAYING, *OF_ENGINES)}
    run = agentrl.train(
        quiet=True,
        inline=True,
        env="tests.flow.worlds:Talkative",
        output_dir=str(output_dir),
        name=name,
        replay=str(folder),
        **acting,
    )
    return run.folder


def weights_of(folder):
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train("Talkative", tmp_path_factory.mktemp("runs"), "cut", **SETTINGS)


def test_engine_trainer_and_reference_agree_on_the_distribution_that_was_sampled(run):
    first, *_ = rows = steps_of(run.folder)
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-4
    # The reference is the policy itself before the first step.
    assert abs(first["train/kl_loss"]) < 1e-6


def test_the_journal_has_the_kept_ids_and_a_replay_trains_on_them(run, tmp_path):
    completions = completions_of(run.folder)
    assert completions
    assert all("kept_ids" in completion["extras"] for completion in completions)
    assert weights_of(replayed(run.folder, tmp_path, "again")) == weights_of(run.folder)


def test_without_the_kept_ids_engine_and_trainer_disagree(run, tmp_path):
    """The mass that the cut took away, in nats."""
    folder = tmp_path / "stripped"
    shutil.copytree(run.folder, folder)
    for path in (folder / "trajectories").glob("*.jsonl.gz"):
        with gzip.open(path, "rt") as file:
            entries = [json.loads(line) for line in file]
        turns = [
            t for e in entries for trajectory in e["episode"]["trajectories"] for t in trajectory["turns"]
        ]
        for turn in turns:
            turn["tokens"]["completion"].pop("extras", None)
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
    row = steps_of(replayed(folder, tmp_path, "again"))[0]
    assert 0.02 < row["train/train_rollout_logprob_abs_diff"] <= -math.log(0.9) + 1e-4


def test_without_replay_logprobs_are_the_whole_policys(run, tmp_path):
    plain = train("Talkative", tmp_path, "plain", replay_sampling_mask=False, **SETTINGS)
    ours, theirs = completions_of(run.folder)[0], completions_of(plain.folder)[0]
    assert ours["token_ids"] == theirs["token_ids"]
    assert "extras" not in theirs
    assert all(a > b for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True))
    assert weights_of(plain.folder) != weights_of(run.folder)
