"""`agentrl envs new` writes a package that installs, passes its check and its own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl import UserError
from agentrl.envs.scaffold import scaffold
from tests.house.source import ROOT

AGENTRL = [sys.executable, "-m", "agentrl.cli"]


def run(*command, folder, path=""):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (path, ROOT))) if path else str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("name", ["WordPairs", "word-pairs", "word_pairs"])
def test_every_spelling_gives_one_package_one_class_and_one_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = scaffold(name)
    assert (new.folder, new.package, new.env_class, new.env_id) == (
        Path("word_pairs"),
        "word_pairs",
        "WordPairs",
        "WordPairs-v0",
    )
    assert (tmp_path / "word_pairs" / "src" / "word_pairs" / "env.py").exists()


def test_the_package_installs_passes_its_check_and_its_tests(tmp_path):
    created = run(*AGENTRL, "envs", "new", "HTTPWords2", "--dir", "mine", folder=tmp_path)
    assert created.returncode == 0, created.stderr
    assert "HTTPWords2-v0 stands in mine" not in created.stdout  # words are capitalised, nothing else is
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    installed = run(*pip, "--target", "site", "./mine", folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    site = tmp_path / "site"
    assert (site / "http_words_2" / "py.typed").exists()

    checked = run(
        *AGENTRL, "envs", "check", "HttpWords2-v0", "--json", "--n", "8", folder=tmp_path, path=site
    )
    assert checked.returncode == 0, checked.stderr
    report = json.loads(checked.stdout)
    assert (report["env"], report["ok"], report["findings"]) == ("HttpWords2-v0", True, [])

    tested = run(sys.executable, "-m", "pytest", "-q", "mine/tests", folder=tmp_path, path=site)
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout


def test_what_is_written_is_as_clean_as_our_own_code(tmp_path):
    scaffold("WordPairs", tmp_path / "mine")
    ruff = run(sys.executable, "-m", "ruff", "check", "mine/src", folder=tmp_path)
    assert ruff.returncode == 0, ruff.stdout
    formatted = run(
        sys.executable, "-m", "ruff", "format", "--check", "--line-length", "110", "mine", folder=tmp_path
    )
    assert formatted.returncode == 0, formatted.stdout


@pytest.mark.parametrize("name", ["", "9lives", "a b", "über", "../x", "x" * 3 + "!", "-x"])
def test_a_bad_name_is_a_one_sentence_error(name, tmp_path):
    with pytest.raises(UserError, match="cannot be called") as caught:
        scaffold(name, tmp_path / "new")
    assert repr(name) in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["json", "class", "Task", "ToolEnv", "calculator", "agentrl"])
def test_a_name_that_is_taken_is_a_one_sentence_error(name, tmp_path):
    with pytest.raises(UserError, match="choose another name"):
        scaffold(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_not_changed(tmp_path):
    with pytest.raises(UserError, match="exists already"):
        scaffold("WordPairs", tmp_path)
    assert list(tmp_path.iterdir()) == []
