"""The table of bad inputs: each is one sentence, with exit code 2 and without a traceback.

`bad_inputs.toml` holds what users type, as command lines and as Python, and the whole sentence that they get;
an … in it stands for any text.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import agentrl
from agentrl.cli import main
from tests.flow.worlds import Bandit

TABLE = tomllib.loads(Path(__file__).with_suffix("").with_name("bad_inputs.toml").read_text())
FILES = TABLE["files"]
INPUTS = {row["command"]: row["sentence"] for row in TABLE["input"]}
CALLS = {row["call"]: row["sentence"] for row in TABLE["python"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the table names, an empty folder, and two that pass for runs."""
    folder = tmp_path_factory.mktemp("place")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("COLUMNS", "200")


def check(sentence, expected):
    pattern = ".+".join(map(re.escape, expected.split("…")))
    assert re.fullmatch(pattern, sentence), f"{sentence}\n  is not\n{expected}"


def files_in(folder):
    """All files and folders, without bytecode."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("command", INPUTS)
def test_a_bad_command_is_one_sentence_and_exit_code_2(command, place, capsys):
    before = files_in(place)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    printed = capsys.readouterr()
    assert ended.value.code == 2, printed
    (line,) = printed.err.splitlines()
    check(line.removeprefix("agentrl: "), INPUTS[command])
    assert files_in(place) == before


@pytest.mark.parametrize("call", CALLS)
def test_a_bad_call_is_an_error_with_one_sentence(call):
    with pytest.raises(agentrl.UserError) as refused:
        eval(call, {"agentrl": agentrl, "Bandit": Bandit})
    check(str(refused.value), CALLS[call])


def test_the_table_is_as_long_as_promised():
    assert len(INPUTS) == len(TABLE["input"]) >= 120
    assert len(CALLS) == len(TABLE["python"]) >= 25


def test_the_comparison_bites():
    with pytest.raises(AssertionError):
        check("there is no run file x; check the path", "there is no run file x; check the path.")
    with pytest.raises(AssertionError):
        check("no environment `x`. Installed: .", "no environment `x`. Installed: …a.")
