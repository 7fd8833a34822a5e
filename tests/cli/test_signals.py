"""SIGTERM and SIGHUP end every command as Ctrl-C does, in mid-work and at once."""

from __future__ import annotations

import json
import signal
import time

import pytest

from agentrl.cli import main
from agentrl.records import read_journal, reconcile
from tests.evaluation.benchmark.worlds import Signalled

WORLD = "tests.evaluation.benchmark.worlds:Signalled"
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
PLAYED = 6


def benchmark(folder, n):
    return ["benchmark", WORLD, "--model", "expert", "--n", str(n), "--output-dir", str(folder)]


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """Recorded episodes of the world."""
    Signalled.at = 0
    folder = tmp_path_factory.mktemp("played")
    main([*benchmark(folder, PLAYED), "--json"])
    (cell,) = (folder / "cells").iterdir()
    return cell


def interrupted(words, number, at=1):
    """The exit code of a command that is interrupted in a reset, and the CPU seconds until its end."""
    Signalled.at, Signalled.resets, Signalled.number, Signalled.struck_s = at, 0, number, 0.0
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    seconds = time.process_time() - Signalled.struck_s
    Signalled.at = 0
    assert Signalled.struck_s > 0, "the signal came in mid-work"
    return ended.value.code, seconds


@pytest.mark.parametrize(("number", "code"), SIGNALS)
@pytest.mark.parametrize("command", ["replay", "rescore", "check"])
def test_a_signal_ends_a_command_in_mid_work(cell, capsys, command, number, code):
    words = {
        "replay": ["replay", f"{next((cell / 'trajectories').iterdir())}:e0"],
        "rescore": ["rescore", cell, "--reward", "tests.evaluation.benchmark.worlds:hanging"],
        "check": ["envs", "check", WORLD],
    }[command]
    ended, seconds = interrupted(words, number, at=1)
    assert (ended, seconds < 2.0) == (code, True)
    text = capsys.readouterr()
    assert "Traceback" not in text.out + text.err


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_an_interrupted_benchmark_says_how_it_goes_on(tmp_path, capsys, number, code):
    ended, seconds = interrupted(benchmark(tmp_path / "b", 20_000), number, at=300)
    assert (ended, seconds < 2.0) == (code, True)
    sentence = f"Stopped. Go on with `agentrl benchmark {tmp_path / 'b'} --resume`."
    assert sentence in " ".join(capsys.readouterr().out.split())
    (cell,) = (tmp_path / "b" / "cells").iterdir()
    assert reconcile(cell).problems == ()
    (path,) = (cell / "trajectories").iterdir()
    assert 300 - 256 <= len(list(read_journal(path))) < 300


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_benchmark_that_was_interrupted_plays_only_what_it_lacks(tmp_path, capsys, number, code):
    folder = tmp_path / "b"
    assert interrupted(benchmark(folder, 300), number, at=280)[0] == code
    (cell,) = (folder / "cells").iterdir()
    kept = reconcile(cell).evaluated
    assert 0 < kept < 280
    Signalled.resets = 0
    capsys.readouterr()
    main(["benchmark", str(folder), "--resume", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["scored"], Signalled.resets) == (300, 300 - kept)
