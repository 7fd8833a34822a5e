"""A disk that is full or read-only while a run goes on, in a namespace: one sentence, and nothing is torn."""

from __future__ import annotations

import json
import re

import pytest

import agentrl
from agentrl.errors import DiskError
from agentrl.records import members, reconcile
from agentrl.trainer.ranks import RankTrainer
from tests.disks import file_size_limit, on_small_disk
from tests.flow.runs import TINY, train

MAIN = "import sys; from agentrl.cli import main; main(sys.argv[1:])"


def check_whole(folder):
    """The journal holds complete entries, each once, and the settings are those of the run."""
    paths = list((folder / "trajectories").iterdir())
    assert paths
    for path in paths:
        assert path.stat().st_size == members.end_of_members(path)
    assert reconcile(folder).problems == ()
    assert (folder / "config.toml").stat().st_size > 0


def check_sentence(process, pattern):
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    assert re.fullmatch(rf"agentrl: {pattern}\n", process.stderr), process.stderr


@pytest.mark.full
def test_a_training_that_fills_its_disk(tmp_path):
    """Checkpoints fail first, and are reported; the journal ends the run."""
    disk = tmp_path / "disk"
    settings = {**TINY, "env": "tests.flow.worlds:Talkative", "num_rollout": 100_000, "save_interval": 3}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    place = (f"--output-dir={disk}", "--name=x", "--inline")
    process = on_small_disk(disk, 6_000, MAIN, "train", *words, *place)
    check_sentence(process, rf"{disk}/x.* cannot be written \(No space left on device\); make room.*")
    check_whole(tmp_path / "disk.copy" / "x")


@pytest.mark.full
def test_a_benchmark_whose_folder_becomes_read_only(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    monkeypatch.setenv("FROZEN", str(disk))
    words = (
        "benchmark",
        "tests.evaluation.benchmark.worlds:Frozen",
        "--model",
        "expert",
        "--n",
        "2000",
        "--json",
    )
    process = on_small_disk(disk, 20_000, MAIN, *words, "--output-dir", str(disk / "b"))
    check_sentence(process, rf"{disk}/b.* cannot be written \(Read-only file system\); make room.*")
    (cell,) = (tmp_path / "disk.copy" / "b" / "cells").iterdir()
    check_whole(cell)
    assert 0 < reconcile(cell).evaluated < 2000


SMALL = {
    **TINY,
    "num_rollout": 3,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "save_interval": 1,
    "use_tensorboard": False,
}


@pytest.mark.parametrize("words", [0, 20_000], ids=["no weights fit", "no tokenizer fits"])
def test_a_disk_that_is_full_when_the_final_model_is_written(tmp_path, monkeypatch, words):
    whole = train("Bandit", tmp_path, "whole", **SMALL).folder / "checkpoint"
    save, refused = RankTrainer.save, []

    async def onto_a_full_disk(self, directory):
        # The kernel refuses to write it; what is made of that is the writers' own.
        (tmp_path / "x" / "model" / "words.txt").write_bytes(bytes(words))
        with file_size_limit(10_000):
            refused.append(directory)
            await save(self, directory)

    monkeypatch.setattr(RankTrainer, "save", onto_a_full_disk)
    folder = tmp_path / "x"
    sentence = rf"{folder}.* cannot be written \(File too large\); make room there.*--resume`\."
    with pytest.raises(DiskError, match=sentence):
        train("Bandit", tmp_path, "x", **SMALL)
    assert refused == [str(folder / "checkpoint")]
    assert not (folder / "checkpoint").exists()
    check_whole(folder)
    monkeypatch.undo()
    agentrl.train(folder, quiet=True)
    weights = "model.safetensors"
    assert (folder / "checkpoint" / weights).read_bytes() == (whole / weights).read_bytes()
    assert json.loads((folder / "summary.json").read_text())["ended"] == "finished"
    assert reconcile(folder).problems == ()
