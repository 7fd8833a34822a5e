"""Supervised fine-tuning: whole runs, how they end, and how they resume."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError, RunBusyError, RunExistsError
from agentrl.records.diagnoses import read_diagnoses
from agentrl.records.history import attempts, locked
from agentrl.records.status import read_status
from agentrl.run.checkpoints import Checkpoints
from agentrl.trainer.ranks import RankTrainer
from tests.flow.runs import HEARING, metrics_of, train
from tests.flow.sft import SMALL, conversations, reader_of, settings_of, sft
from tests.records.test_history import contents

ROOT = Path(__file__).parents[2]


def weights_of(folder):
    return (folder / "checkpoint" / "model.safetensors").read_bytes()


def facts_of(folder):
    """The metrics, without those of the clock."""
    return [
        {k: v for k, v in row.items() if k != "time_s" and not k.startswith("perf/")}
        for row in metrics_of(folder)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    conversations(folder / "c.jsonl")
    return folder


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody stopped."""
    return sft(place / "whole", **settings_of(place))


def test_a_run_leaves_its_last_status_and_a_trace(whole):
    status = read_status(whole.folder)
    assert not status.working
    assert (status.places, status.served) == (None, None)
    (trace,) = (whole.folder / "timeline").glob("attempt_1.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name", "").startswith("train") for event in events) >= whole.steps


def test_a_run_learns_and_records_its_losses(whole, place):
    assert whole.steps == 10
    assert whole.taken == 80
    assert set(whole.losses) == {0, 5, 10}
    assert whole.losses[10] < 0.5 * whole.losses[0]
    rows = metrics_of(whole.folder)
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == [*range(1, 11)]
    assert trained[-1]["train/epoch"] == 2.0
    assert all(row["train/lr"] == 1e-2 and row["train/grad_norm"] > 0 for row in trained)
    assert all(row["perf/actor_train_tok_per_s"] > 0 for row in trained)
    assert {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row} == whole.losses
    page = (whole.folder / "report.html").read_text()
    assert "<b>Loss</b>" in page
    assert "Success on held-out tasks" not in page
    assert json.loads((whole.folder / "summary.json").read_text())["losses"]["10"] == whole.losses[10]
    assert list((whole.folder / "tensorboard").iterdir())


def test_a_healthy_run_has_no_diagnosis(whole):
    assert whole.diagnoses == ()
    assert json.loads((whole.folder / "summary.json").read_text())["diagnoses"] == []
    assert "What goes wrong" not in (whole.folder / "report.html").read_text()


def test_a_fault_is_printed_once_and_in_all_results(place, tmp_path, monkeypatch, capfd):
    async def broken(*args, **options):
        return math.nan

    monkeypatch.setattr("agentrl.run.sft_training.held_out_loss", broken)
    result = sft(tmp_path, **settings_of(place, num_epoch=1, quiet=False))
    (diagnosis,) = result.diagnoses
    assert (diagnosis.name, diagnosis.step) == ("not-finite", 0)
    assert capfd.readouterr().out.count("Warning: not-finite: the held-out loss of step 0 is not a") == 1
    assert read_diagnoses(result.folder) == [diagnosis]
    assert json.loads((result.folder / "summary.json").read_text())["diagnoses"][0]["name"] == "not-finite"
    assert "What goes wrong" in (result.folder / "report.html").read_text()
    assert "not-finite" in result._repr_html_()


async def test_the_held_out_loss_is_that_of_the_saved_model(whole, place):
    """By transformers in float64, one conversation at a time, under the loss masks."""
    reader = reader_of(whole.folder / "checkpoint")
    held_out = await reader.read([f"{place / 'c.jsonl'}@[-20:]"], "eval_sft_data")
    model = AutoModelForCausalLM.from_pretrained(whole.folder / "checkpoint", dtype=torch.float64).eval()
    logprobs = []
    for sample in held_out.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            table = torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=-1)
        logprobs += [table[t - 1, ids[t]].item() for t in np.flatnonzero(sample.loss_mask)]
    assert len(logprobs) == sum(int(sample.loss_mask.sum()) for sample in held_out.samples)
    assert whole.losses[10] == pytest.approx(-np.mean(logprobs), abs=1e-5)


def test_rl_starts_from_the_checkpoint(whole, tmp_path):
    result = train(
        "Bandit",
        tmp_path,
        "rl",
        hf_checkpoint=str(whole.folder / "checkpoint"),
        num_rollout=1,
        eval_episodes=8,
    )
    # After SFT most episodes have the form of the conversations, and end with an answer.
    assert result.reports["before"]["sampled"].by
    rollout = next(row for row in metrics_of(result.folder) if "rollout/truncated_ratio" in row)
    assert rollout["rollout/truncated_ratio"] < 0.6


class StruckError(Exception):
    """The run breaks off."""


def broken_off(monkeypatch, place, folder, at, method="update"):
    """A run that breaks off in a method of the trainer, when that is called for the time `at`."""
    calls = 0
    original = getattr(RankTrainer, method)

    async def struck(self, *args):
        nonlocal calls
        calls += 1
        if calls == at:
            raise StruckError
        return await original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(RankTrainer, method, struck)
        with pytest.raises(StruckError):
            sft(folder, **settings_of(place))


@pytest.mark.parametrize("at", [2, 5, 8, 10])
def test_a_run_that_broke_off_ends_as_if_it_had_not(monkeypatch, place, whole, tmp_path, at):
    broken_off(monkeypatch, place, tmp_path, at)
    folder = tmp_path / "x-sft"
    assert agentrl.sft(folder, resume=True, quiet=True).losses == whole.losses
    assert weights_of(folder) == weights_of(whole.folder)
    assert facts_of(folder) == facts_of(whole.folder)
    first, second = attempts(folder)
    assert (first.ended, second.ended, second.command) == ("failed", "finished", "sft")
    # A checkpoint every four steps; none of the step that was in progress.
    assert second.resumed_from == ((at - 1) // 4 * 4 or None)


def test_a_run_that_is_stopped_between_two_steps_has_a_checkpoint_of_the_last(
    monkeypatch, place, whole, tmp_path
):
    """In the evaluation after step 5, which is then made by the run that resumes."""
    broken_off(monkeypatch, place, tmp_path, 3, "score")
    folder = tmp_path / "x-sft"
    assert agentrl.sft(folder, quiet=True).losses == whole.losses
    assert attempts(folder)[1].resumed_from == 5
    assert weights_of(folder) == weights_of(whole.folder)
    assert facts_of(folder) == facts_of(whole.folder)


def test_a_finished_run_resumes_to_the_same_end(place, whole):
    before = facts_of(whole.folder)
    again = agentrl.sft(whole.folder, resume=True, quiet=True)
    assert again.losses == whole.losses
    assert facts_of(whole.folder) == before


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"seed": 3}, "was begun with seed = 0, and that cannot become 3"),
        ({"num_epoch": 3}, "was begun with num_epoch = 2, and that cannot become 3"),
    ],
)
def test_a_setting_that_decides_what_is_learned_stays(whole, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        agentrl.sft(whole.folder, quiet=True, **settings)


def test_a_second_run_of_the_name_is_refused_before_it_writes(place, tmp_path):
    folder = tmp_path / "x-sft"
    with locked(folder):
        before = contents(folder)
        with pytest.raises(RunBusyError, match=f"another process works on {folder} "):
            sft(tmp_path, **settings_of(place))
        assert contents(folder) == before


def test_data_that_has_changed_is_refused(monkeypatch, tmp_path):
    conversations(tmp_path / "c.jsonl")
    broken_off(monkeypatch, tmp_path, tmp_path, 6)
    conversations(tmp_path / "c.jsonl", seed=1)
    with pytest.raises(ConfigError, match="the conversations are not those that the run began with"):
        agentrl.sft(tmp_path / "x-sft", quiet=True)


def test_each_command_resumes_its_own_runs(whole, place, tmp_path):
    with pytest.raises(
        ConfigError, match=r"is a run of `agentrl sft`; resume it with `agentrl sft .*--resume"
    ):
        agentrl.train(whole.folder, quiet=True)
    rl = train("Bandit", tmp_path, "rl", num_rollout=0, eval_episodes=2)
    with pytest.raises(ConfigError, match="is a run of `agentrl train`"):
        agentrl.sft(rl.folder, quiet=True, sft_data=str(place / "c.jsonl"))
    with pytest.raises(RunExistsError, match=r"resume it \(`agentrl sft .*x-sft --resume`\)"):
        sft(place / "whole", **settings_of(place))


@pytest.mark.full
@pytest.mark.parametrize(
    "ranks",
    [
        {"inline": False},
        {"trainer": "megatron", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2},
    ],
    ids=["torch", "megatron"],
)
def test_ranks_of_either_trainer_learn_what_one_process_does(place, tmp_path, ranks):
    """Also their checkpoints, which a second attempt resumes from."""
    shape = {"num_query_groups": 2}
    expected = sft(tmp_path, "inline", **settings_of(place, **shape))
    layout = {"inline": False, **ranks}
    result = sft(tmp_path, "ranks", **settings_of(place, **shape, **layout))
    assert result.losses == pytest.approx(expected.losses, abs=1e-3)
    newest = Checkpoints(result.folder / "checkpoints", keep=1).newest()
    assert newest is not None
    assert newest.state.step == 10
    again = agentrl.sft(result.folder, quiet=True)
    assert again.losses == result.losses
    reply = train("Bandit", tmp_path, "rl", hf_checkpoint=str(result.folder / "checkpoint"), num_rollout=1)
    assert "rollout/raw_reward" in {name for row in metrics_of(reply.folder) for name in row}


@pytest.mark.faults
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(place, tmp_path):
    options = settings_of(place, num_epoch=40, save_interval=3, eval_interval=10)
    whole = sft(tmp_path, "whole", **options)
    chance, folder = random.Random(0), tmp_path / "struck-sft"
    for _ in range(6):
        process = started(tmp_path, "struck", **options)
        saved, deadline = newest_of(folder), time.monotonic() + 300
        while newest_of(folder) < saved + 3 * chance.randrange(1, 4):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        process.communicate()
    process = started(tmp_path, "struck", **options)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert [attempt.ended for attempt in attempts(folder)] == [None] * 6 + ["finished"]
    assert weights_of(folder) == weights_of(whole.folder)
    assert facts_of(folder) == facts_of(whole.folder)


def newest_of(folder):
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def started(folder, name, **settings):
    """`agentrl sft --resume` in a process of its own."""
    options = {**SMALL, "output_dir": folder, "name": name, **settings}
    words = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in options.items()
        if key not in ("quiet", "inline")
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", HEARING, "sft", *words, "--inline", "--resume"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_report_and_what_a_run_resumes_from(monkeypatch, place, whole, tmp_path, number):
    struck = RankTrainer.update

    async def interrupted(self, batch):
        report = await struck(self, batch)
        if report.metrics["train/loss"] < 1.5:
            # It takes effect at the next wait.
            os.kill(os.getpid(), number)
        return report

    with monkeypatch.context() as patched:
        patched.setattr(RankTrainer, "update", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            sft(tmp_path, **settings_of(place))
    folder = tmp_path / "x-sft"
    assert newest_of(folder) == 7
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], set(summary["losses"])) == ("interrupted", 7, {"0", "5"})
    assert "interrupted after 7 of 10 steps" in (folder / "report.html").read_text()
    agentrl.sft(folder, quiet=True)
    assert weights_of(folder) == weights_of(whole.folder)


def test_the_command_prints_the_folder_and_takes_the_flags_that_act(place, tmp_path, capfd):
    words = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k not in ("inline", "quiet")]
    options = [f"--output-dir={tmp_path}", f"--sft-data={place / 'c.jsonl'}", "--inline", "--quiet"]
    main(["sft", *words, *options, "--num-epoch=1", "--name=cli"])
    assert capfd.readouterr().out.strip() == str(tmp_path / "cli-sft")
    with pytest.raises(SystemExit) as ended:
        main(["sft", *words, *options, "--num-rollout=3"])
    assert ended.value.code == 2
    assert "--num-rollout" in capfd.readouterr().err
    main(["runs", "show", "cli-sft", f"--output-dir={tmp_path}", "--json"])
    facts = json.loads(capfd.readouterr().out)
    assert (facts["command"], facts["step"], facts["of"]) == ("sft", 7, None)
    with pytest.raises(SystemExit):
        main(["runs", "audit", "cli-sft", f"--output-dir={tmp_path}"])
    assert "which plays no prompts" in capfd.readouterr().err
