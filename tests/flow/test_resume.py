"""A run that was stopped resumes from its last checkpoint, and ends as if it had never been stopped."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import ConfigError, DiskError, UserError
from agentrl.records import members, reconcile
from agentrl.records.history import attempts
from agentrl.run.audit import Audit, audit
from tests.disks import file_size_limit
from tests.flow.runs import HEARING, SHAPE, TINY, metrics_of, options_of, train
from tests.flow.test_bad_input import complaint
from tests.flow.worlds import Struck

ROOT = Path(__file__).parents[2]
SMALL = {
    **TINY,
    "num_rollout": 5,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "eval_interval": 2,
    "eval_episodes": 4,
    "save_interval": 2,
    "use_tensorboard": False,
}


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def weights_of(folder: Path) -> bytes:
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


def facts_of(folder: Path) -> list[dict[str, float]]:
    """The metrics, without those of the clock."""
    return [
        {k: v for k, v in row.items() if k != "time_s" and not k.startswith("perf/") and "latency" not in k}
        for row in metrics_of(folder)
    ]


def accounted(folder: Path) -> Audit:
    """The audit of a run, which found nothing wrong."""
    found = audit(folder)
    assert found.problems == ()
    assert found.started == found.trained + sum(found.dropped.values()) + found.skipped
    return found


def same(one: Path, other: Path) -> None:
    assert weights_of(one) == weights_of(other)
    assert facts_of(one) == facts_of(other)
    assert reconcile(one) == reconcile(other)
    assert accounted(one).started == accounted(other).started


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stopped."""
    Struck.at = None
    return train("Struck", tmp_path_factory.mktemp("whole"), "x", **SMALL).folder


@pytest.mark.parametrize("reset", [28, 36, 60, 68])
def test_a_run_that_broke_off_ends_as_if_it_had_not(whole, tmp_path, reset):
    Struck.at, Struck.resets = reset, 0
    with pytest.raises(UserError, match="struck"):
        train("Struck", tmp_path, "x", **SMALL)
    Struck.at = None
    folder = tmp_path / "x"
    (first,) = attempts(folder)
    assert first.ended == "failed"
    assert agentrl.train(folder, quiet=True).folder == folder
    same(folder, whole)
    second = attempts(folder)[1]
    assert second.ended == "finished"
    assert second.resumed_from is not None
    assert second.resumed_from > 0


async def hang(number):
    """Send this process a signal, and wait for its effect."""
    os.kill(os.getpid(), number)
    await asyncio.sleep(3600)


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_a_signal_leaves_a_report_of_what_was_measured_and_the_run_goes_on(
    whole, tmp_path, monkeypatch, capsys, number, ended
):
    """In the third iteration, while episodes are played."""
    monkeypatch.setattr(Struck, "strike", lambda self: hang(number))
    Struck.at, Struck.resets = 36, 0
    started = time.monotonic()
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        agentrl.train(**options_of("Struck", tmp_path, "x", **SMALL))
    assert time.monotonic() - started < 60.0, "the reset hangs for an hour"
    Struck.at = None
    assert (number == signal.SIGTERM) == (isinstance(caught.value, SystemExit) and caught.value.code == 143)
    folder = tmp_path / "x"
    assert attempts(folder)[0].ended == ended
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["steps"]) == ("interrupted", 2)
    assert [milestone["name"] for milestone in summary["milestones"]] == ["before", "iteration 2"]
    page = (folder / "report.html").read_text()
    assert "interrupted after 2 of 5 iterations" in page
    assert "How it went" in page
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Stopped. Resume it with `agentrl train {folder} --resume`." in printed
    assert f"Report: {folder / 'report.html'}" in printed
    assert reconcile(folder).problems == ()
    assert {row["step"] for row in metrics_of(folder)} == {0, 1, 2}
    agentrl.train(folder, quiet=True)
    same(folder, whole)
    assert json.loads((folder / "summary.json").read_text())["ended"] == "finished"
    assert "interrupted" not in (folder / "report.html").read_text()


def test_a_disk_that_gets_full_in_mid_run_is_one_sentence_and_the_run_goes_on(whole, tmp_path, monkeypatch):
    """In the third iteration; no file may grow any more."""

    async def fill(self):
        disk.enter_context(file_size_limit(1000))

    monkeypatch.setattr(Struck, "strike", fill)
    Struck.at, Struck.resets = 36, 0
    folder = tmp_path / "x"
    with ExitStack() as disk, pytest.raises(DiskError) as caught:
        agentrl.train(quiet=True, **options_of("Struck", tmp_path, "x", **SMALL))
    assert Struck.resets > 36, "the disk was full in mid-run"
    Struck.at = None
    sentence = rf"{folder}.* cannot be written \(File too large\); make room.*"
    assert re.fullmatch(sentence, str(caught.value)), caught.value
    assert attempts(folder)[0].ended in ("failed", None)
    for path in (folder / "trajectories").iterdir():
        assert path.stat().st_size == members.end_of_members(path)
    assert reconcile(folder).problems == ()
    assert (folder / "config.toml").stat().st_size > 0
    agentrl.train(folder, quiet=True)
    same(folder, whole)


def test_what_a_run_without_metrics_recorded_is_no_part_of_the_run_that_takes_its_place(
    whole, tmp_path, monkeypatch
):
    """It was killed between the journal and the metrics of its first evaluation."""
    monkeypatch.setattr(Struck, "strike", lambda self: hang(signal.SIGINT))
    Struck.at, Struck.resets = 6, 0
    with pytest.raises(KeyboardInterrupt):
        train("Struck", tmp_path, "x", **SMALL)
    Struck.at = None
    folder, (first, *_) = tmp_path / "x", sorted((whole / "trajectories").glob("eval_*before*"))
    assert not (folder / "metrics.jsonl").exists()
    (folder / "trajectories").mkdir()
    shutil.copy(first, folder / "trajectories")
    train("Struck", tmp_path, "x", **SMALL)
    same(folder, whole)
    assert (folder / "rolled_back" / "attempt_1" / "trajectories" / first.name).exists()


def test_a_run_without_a_checkpoint_begins_again(whole, tmp_path):
    Struck.at, Struck.resets = 6, 0
    with pytest.raises(UserError, match="struck"):
        train("Struck", tmp_path, "x", **SMALL)
    Struck.at = None
    train("Struck", tmp_path, "x", resume=True, **SMALL)
    same(tmp_path / "x", whole)
    assert attempts(tmp_path / "x")[1].resumed_from is None


def test_what_a_restart_undid_is_kept_beside_the_lineage(whole, tmp_path):
    Struck.at, Struck.resets = 60, 0
    with pytest.raises(UserError, match="struck"):
        train(
            "Struck",
            tmp_path,
            "x",
            save_interval=100,
            **{k: v for k, v in SMALL.items() if k != "save_interval"},
        )
    Struck.at = None
    folder = tmp_path / "x"
    # As kill -9 leaves it: without the checkpoint that the stop itself wrote.
    for path in (folder / "checkpoints").iterdir():
        path.rename(folder / f"gone-{path.name}")
    before = {row["step"] for row in metrics_of(folder)}
    agentrl.train(folder, quiet=True)
    same(folder, whole)
    undone = folder / "rolled_back" / "attempt_1"
    rows = [json.loads(line) for line in (undone / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == before
    assert any((undone / "trajectories").iterdir())
    assert set(accounted(folder).rolled_back) == {"attempt_1"}
    assert accounted(folder).rolled_back["attempt_1"] >= 3 * 8


def test_a_finished_run_goes_on_with_more_iterations(whole, tmp_path):
    Struck.at = None
    short = {**SMALL, "num_rollout": 3}
    train("Struck", tmp_path, "x", **short)
    stages = agentrl.train(tmp_path / "x", quiet=True, num_rollout=5).stages
    # Those of both attempts.
    assert {stage.name: stage.steps for stage in stages}["RL"] == 5
    # The evaluation after the third was the last one, and is undone.
    same(tmp_path / "x", whole)
    assert attempts(tmp_path / "x")[1].changes == {"num_rollout": "3 -> 5"}


def test_a_run_goes_back_to_an_earlier_checkpoint_and_what_came_later_is_put_aside(whole, tmp_path):
    Struck.at = None
    train("Struck", tmp_path, "x", **SMALL, save_total_limit=9)
    folder = tmp_path / "x"
    steps = [step_of(path) for path in (folder / "checkpoints").iterdir()]
    before, later = sorted(steps)[1], {step for step in steps if step > sorted(steps)[1]}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert later
    assert agentrl.train(folder, resume=before, quiet=True).folder == folder
    same(folder, whole)
    assert attempts(folder)[1].resumed_from == before
    undone = folder / "rolled_back" / "attempt_1"
    assert {step_of(path) for path in (undone / "checkpoints").iterdir()} == later
    assert (undone / "metrics.jsonl").read_text().splitlines() == lines[-len(metrics_of(undone)) :]
    assert {step_of(path) for path in (folder / "checkpoints").iterdir()} == set(steps)


def test_a_checkpoint_that_is_not_there_is_one_sentence_and_nothing_changes(whole, tmp_path, capsys):
    copy = tmp_path / "x"
    shutil.copytree(whole, copy)
    listing = sorted(str(path) for path in copy.rglob("*"))
    assert re.search(
        r"has no checkpoint of step 77; it has those of: [\d, ]+ \(save_total_limit says how many are kept\)",
        complaint(capsys, "train", str(copy), "--ckpt-step", "77"),
    )
    assert sorted(str(path) for path in copy.rglob("*")) == listing
    assert "holds no run that could go on after step 3; leave that out." in complaint(
        capsys, "train", "--env", "Calculator-v0", "--output-dir", str(tmp_path), "--ckpt-step", "3"
    )


def test_a_damaged_checkpoint_is_passed_over(whole, tmp_path, capsys):
    Struck.at = None
    train("Struck", tmp_path, "x", **SMALL)
    folder = tmp_path / "x"
    newest = max((folder / "checkpoints").iterdir())
    state = next((newest / "trainer").rglob("state.pt"))
    with state.open("r+b") as file:
        file.seek(1000)
        file.write(b"torn")
    agentrl.train(folder)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "is damaged (trainer/policy/state.pt is not as it was written); the checkpoint before it is used"
        in said
    )
    same(folder, whole)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"n_samples_per_prompt": 8}, "was begun with n_samples_per_prompt = 4, and that cannot become 8"),
        ({"seed": 3}, "was begun with seed = 0, and that cannot become 3"),
        ({"eps_clip": 0.1}, "was begun with eps_clip = its default, and that cannot become 0.1"),
    ],
)
def test_a_setting_that_decides_what_is_learned_stays(whole, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        agentrl.train(whole, quiet=True, **settings)


def test_a_setting_that_is_left_out_is_no_reason_to_leave_it_out(whole):
    """Resumed by name, a run gets the settings that are given, and the others at their defaults."""
    settings = {**options_of("Struck", whole.parent, whole.name, **SMALL), "resume": True, "quiet": True}
    sentence = (
        rf"n_samples_per_prompt = 4, .* resume it by its folder \(`agentrl train {whole} --resume`\), or"
    )
    with pytest.raises(ConfigError, match=sentence):
        agentrl.train(**{name: value for name, value in settings.items() if name != "n_samples_per_prompt"})


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: there is no config\.toml in it"):
        agentrl.train(tmp_path, quiet=True)


def started(folder: Path, *flags: str, world: str = "Slow", **settings: object) -> subprocess.Popen[str]:
    """A run in a process of its own."""
    small = {name: value for name, value in SMALL.items() if name not in SHAPE}
    options = options_of(world, folder, "x", **{**small, **settings})
    # Whether it is in one process, `flags` say.
    words = [_word(name.replace("_", "-"), value) for name, value in options.items() if name != "inline"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-c", HEARING, "train", *words, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _word(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def test_sigterm_leaves_a_checkpoint_and_exit_code_143(tmp_path):
    process = started(tmp_path, "--inline", num_rollout=100_000, save_interval=1, eval_interval=100_000)
    deadline = time.monotonic() + 180
    while newest(tmp_path / "x") < 1:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "--resume`." in " ".join(out.split())
    assert "Traceback" not in out
    (attempt,) = attempts(tmp_path / "x")
    assert attempt.ended == "terminated"
    names = [path.name for path in (tmp_path / "x" / "checkpoints").iterdir()]
    # The two newest ones, and the best.
    assert 1 <= len(names) <= 3
    assert all(name.startswith("step_") for name in names)


PROCESSES = {
    "one": ("--inline",),
    "megatron": ("--inline", "--trainer=megatron", "--actor-num-gpus-per-node=2"),
    "engine and trainer": ("--enable-deterministic-inference",),
}
"""Processes beside the driver's: none, two Megatron ranks, an engine and a rank."""


@pytest.mark.faults
@pytest.mark.parametrize("flags", PROCESSES.values(), ids=PROCESSES)
def test_killed_at_random_moments_it_ends_as_if_it_had_never_been(tmp_path, flags):
    """Also while a checkpoint is written."""
    longer = {
        "num_rollout": 30,
        "save_interval": 1,
        "n_samples_per_prompt": 8,
        "world": "Talkative",
    }
    process = started(tmp_path / "whole", *flags, **longer)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    chance, folder, strikes, in_writing = random.Random(len(flags)), tmp_path / "struck" / "x", 0, 0
    while True:
        process = started(tmp_path / "struck", "--resume", *flags, **longer)
        if strikes < 12:
            strikes += _kill(process, folder, after_steps=chance.randrange(2), in_writing=strikes % 2 == 0)
            in_writing += bool(_partial(folder))
            continue
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
        break
    assert in_writing > 0
    assert [attempt.ended for attempt in attempts(folder)] == [None] * 12 + ["finished"]
    same(folder, tmp_path / "whole" / "x")


def _kill(process: subprocess.Popen[str], folder: Path, *, after_steps: int, in_writing: bool) -> int:
    """Kill a run some steps after the checkpoint that it resumed from, or while it writes one; 1."""
    saved, number, stale = newest(folder), len(attempts(folder)), _partial(folder)
    deadline = time.monotonic() + 300
    while (
        len(attempts(folder)) == number
        or newest(folder) < saved + after_steps
        or (in_writing and _partial(folder) <= stale)
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.communicate()
    return 1


def _partial(folder: Path) -> set[tuple[str, int]]:
    """The checkpoints that are being written, or were when a run was killed."""
    found = set()
    for path in (folder / "checkpoints").glob(".step_*.coming"):
        with suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


def newest(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def test_a_disk_that_takes_no_checkpoint_stops_no_run(tmp_path, capsys):
    """A file stands where the folder of checkpoints has to be."""
    Struck.at = None
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "checkpoints").write_text("in the way")
    agentrl.train(
        quiet=False,
        **{
            **SMALL,
            "env": "tests.flow.worlds:Struck",
            "output_dir": str(tmp_path),
            "name": "x",
            "inline": True,
        },
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint of step 2 could not be written (" in printed
    assert "there is none before it, and the run goes on" in printed
    assert weights_of(tmp_path / "x")
