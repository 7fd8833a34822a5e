"""Ctrl-C and SIGTERM in mid-run: the checkpoint loads, the journal's lines are whole, a report is there."""

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

from agentrl.records import members, read_journal, reconcile
from agentrl.records.history import attempts
from tests.flow.runs import HEARING, TINY, WARM, journal_of, metrics_of

ROOT = Path(__file__).parents[2]
ENDLESS = {**TINY, **WARM, "num_rollout": 100_000, "eval_interval": 100_000, "eval_episodes": 16}
PATIENCE_S = 300.0
"""A limit on a run that hangs: on a machine with other work, its start alone may take minutes."""


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
        start_new_session=True,
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


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(scope="module", params=SIGNALS, ids=lambda number: number.name)
def interrupted(tmp_path_factory, request):
    """A run that was interrupted after at least three iterations, in the middle of another.

    As terminals and schedulers do, the signal is sent to all of its processes.
    """
    place = tmp_path_factory.mktemp("runs")
    process = started(place)
    metrics = place / "x" / "metrics.jsonl"

    def trained():
        return metrics.exists() and metrics.read_text().count("train/loss") >= 3

    try:
        wait_for(process, trained)
        os.killpg(process.pid, request.param)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + request.param
    return place / "x", out, err


@pytest.mark.full
def test_it_ends_at_once_with_a_word_and_without_a_traceback(interrupted):
    folder, out, err = interrupted
    assert "Traceback" not in out + err
    assert "Stopped." in out + err
    assert str(folder) in out + err


@pytest.mark.full
def test_it_has_a_report_and_a_summary_of_what_it_measured(interrupted):
    folder = interrupted[0]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["steps"] >= 3) == ("interrupted", True)
    assert f"interrupted after {summary['steps']} of 100000" in (folder / "report.html").read_text()


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


@pytest.mark.full
def test_of_two_runs_of_one_name_that_begin_at_once_one_is_refused_and_the_other_undisturbed(tmp_path):
    place = tmp_path / "runs"
    options = {"world": "Bandit", "num_rollout": 2}
    processes = [started(place, seed=seed, **options) for seed in (1, 2)]
    ended = [(*process.communicate(timeout=PATIENCE_S), process.returncode) for process in processes]
    (seed, refused), (_, other) = sorted(zip((1, 2), ended, strict=True), key=lambda item: -item[1][2])
    assert (refused[2], other[2]) == (2, 0), ended
    assert refused[1].startswith(f"agentrl: another process works on {place / 'x'} (process ")
    assert refused[1].count("\n") == 1
    folder = place / "x"
    assert f"seed = {seed}" not in (folder / "config.toml").read_text()
    assert reconcile(folder).problems == ()
    assert len(attempts(folder)) == 1
