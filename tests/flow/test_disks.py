"""A disk that is full or read-only while a run goes on, in a namespace: one sentence, and nothing is torn."""

from __future__ import annotations

import re

import pytest

from agentrl.observe import members, reconcile
from tests.disks import on_small_disk
from tests.flow.runs import TINY

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
    words = ("benchmark", "tests.benchmark.worlds:Frozen", "--model", "expert", "--n", "2000", "--json")
    process = on_small_disk(disk, 20_000, MAIN, *words, "--output-dir", str(disk / "b"))
    check_sentence(process, rf"{disk}/b.* cannot be written \(Read-only file system\); make room.*")
    (cell,) = (tmp_path / "disk.copy" / "b" / "cells").iterdir()
    check_whole(cell)
    assert 0 < reconcile(cell).evaluated < 2000
