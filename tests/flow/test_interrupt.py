"""Ctrl-C in mid-run: the checkpoint loads, the journal's lines are whole, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.observe import members, read_journal, reconcile
from tests.flow.runs import HEARING, TINY, WARM, journal_of, metrics_of

ROOT = Path(__file__).parents[2]
ENDLESS = {**TINY, **WARM, "num_rollout": 100_000, "eval_interval": 100_000, "eval_episodes": 16}
PATIENCE_S = 90.0


def started(folder, *, world="Slow", **settings):
    options = {**ENDLESS, "env": f"tests.flow.worlds:{world}", "output_dir": folder, "name": "x", **settings}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", HEARING, "train", *flags]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process, condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run never came so far"
        time.sleep(0.05)


def parsed_lines(path):
    """The lines of a file, each of them JSON, the last one ended."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was interrupted after at least three iterations, in the middle of another."""
    place = tmp_path_factory.mktemp("runs")
    process = started(place)
    metrics = place / "x" / "metrics.jsonl"

    def trained():
        return metrics.exists() and metrics.read_text().count("train/loss") >= 3

    try:
        wait_for(process, trained)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    return place / "x", process.returncode, out, err


@pytest.mark.full
def test_it_ends_at_once_with_a_word_and_without_a_traceback(interrupted):
    folder, code, out, err = interrupted
    assert code == 130
    assert "Traceback" not in out + err
    assert "Stopped." in out + err
    assert str(folder) in out + err


@pytest.mark.full
def test_the_checkpoint_of_the_last_step_loads_and_is_whole(interrupted):
    folder = interrupted[0]
    _, report = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", output_loading_info=True)
    assert not report["missing_keys"]
    assert AutoTokenizer.from_pretrained(folder / "checkpoint").encode("press 0")
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.full
def test_the_checkpoint_has_moved_on_from_the_warm_start(interrupted):
    folder = interrupted[0]
    first, last = (folder / name / "model.safetensors" for name in ("checkpoint-warm-start", "checkpoint"))
    assert first.read_bytes() != last.read_bytes()


@pytest.mark.full
def test_every_line_on_disk_is_whole_and_the_books_are_sound(interrupted):
    folder = interrupted[0]
    for path in (folder / "trajectories").iterdir():
        assert path.stat().st_size == members.end_of_members(path)
        assert list(read_journal(path))
    rows = parsed_lines(folder / "metrics.jsonl")
    books = reconcile(folder)
    assert books.problems == ()
    assert books.played == books.trained + sum(books.dropped.values())
    steps = {row["step"] for row in rows if "train/loss" in row}
    names = [path.name for path in (folder / "trajectories").glob("step_*")]
    journalled = {int(name.removeprefix("step_").removesuffix(".jsonl.gz")) for name in names}
    # What had ended of the batch that was interrupted stands under the step it was played for.
    assert steps == journalled - {max(steps) + 1} == set(range(1, max(steps) + 1))
    stopped = books.dropped.get("run_stopped", 0)
    assert len(journal_of(folder, "step_*")) - stopped == 64 * len(steps)


@pytest.mark.full
def test_an_interrupt_during_the_warm_start_leaves_a_model_too(tmp_path):
    process = started(tmp_path, world="Bandit", warm_start_steps=100_000, num_demonstrations=32, name="early")
    try:
        assert any(line.startswith("warm start") for line in process.stdout)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert all("train/loss" not in row for row in metrics_of(tmp_path / "early"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "early" / "checkpoint")


@pytest.mark.full
def test_a_closed_standard_output_does_not_end_a_run(tmp_path):
    process = started(tmp_path, world="Bandit", num_rollout=2)
    try:
        assert process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=PATIENCE_S) == 0, err
    finally:
        process.kill()
    assert "Traceback" not in err
    assert (tmp_path / "x" / "summary.json").exists()
    assert [row["step"] for row in metrics_of(tmp_path / "x") if "train/loss" in row] == [1, 2]
