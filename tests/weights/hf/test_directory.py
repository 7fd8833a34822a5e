"""A directory appears whole or not at all, and what was there before is kept until then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.weights.hf import directory
from agentrl.weights.hf.directory import atomic_directory


def write(target: Path, text: str) -> None:
    with atomic_directory(target) as coming:
        coming.mkdir()
        (coming / "file").write_text(text)


def fail(target: Path) -> None:
    with atomic_directory(target) as coming:
        coming.mkdir()
        raise RuntimeError("no room")


def test_the_new_takes_the_place_of_the_old(tmp_path):
    for text in ("old", "new"):
        write(tmp_path / "it", text)
        assert (tmp_path / "it" / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_what_fails_leaves_the_old(tmp_path):
    write(tmp_path / "it", "old")
    with pytest.raises(RuntimeError, match="no room"):
        fail(tmp_path / "it")
    assert (tmp_path / "it" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_killed_between_its_renamings_the_old_comes_back(tmp_path, monkeypatch):
    write(tmp_path / "it", "old")
    renamed = []

    def killed(source, target):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(source)
        os.rename(source, target)

    monkeypatch.setattr(directory.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "it", "new")
    monkeypatch.undo()
    assert not (tmp_path / "it").exists()
    with pytest.raises(RuntimeError, match="no room"):
        fail(tmp_path / "it")
    assert (tmp_path / "it" / "file").read_text() == "old"
