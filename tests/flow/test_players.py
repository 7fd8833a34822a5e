"""Groups that are played in processes of their own: the same episodes, the same weights, nothing lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.records.history import attempts
from agentrl.records.status import read_status
from tests.flow.runs import HEARING, journal_of, options_of, train
from tests.flow.test_resume import accounted
from tests.flow.test_settings_act import without_times
from tests.trainer.megatron.launching import descendants, words_of

ROOT = Path(__file__).parents[2]
LATE = {"max_staleness": 1, "correction": "tis", "save_interval": 1}

SHORT = {
    "inline": False,
    "enable_deterministic_inference": True,
    "num_rollout": 2,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 2,
    "num_threads": 1,
}


def played(tmp_path, number, world="Talkative", **settings):
    name = f"players-{number}"
    return train(world, tmp_path, name, **{**SHORT, "num_rollout_workers": number, **settings}).folder


@pytest.mark.full
def test_a_run_is_the_same_with_any_number_of_players(tmp_path):
    folders = [played(tmp_path, number) for number in (0, 1, 2)]
    journals = [without_times(journal_of(folder)) for folder in folders]
    weights = [(folder / "checkpoint" / "model.safetensors").read_bytes() for folder in folders]
    assert journals[0] == journals[1] == journals[2]
    assert weights[0] == weights[1] == weights[2]
    assert len(list((folders[2] / "players").glob("player-*.log"))) == 2
    processes = read_status(folders[2]).processes
    assert processes.keys() == {"rank 0", "engine", "player 0", "player 1"}
    places = {process.where for process in processes.values()}
    assert len(places) == 4
    assert all(where.startswith("process ") for where in places)


OF_PLAYING = {
    "a filter": {"dynamic_sampling_filter_path": "tests.flow.worlds:drop_even_seeds"},
    "a reward of groups": {"group_reward": "tests.flow.worlds:place"},
    "a generate function": {"custom_generate_function_path": "tests.flow.worlds:hinted"},
    "over-sampling": {
        "over_sampling_batch_size": 6,
        "buffer_filter_path": "agentrl.algorithms.filters:highest_std",
    },
}


@pytest.mark.full
@pytest.mark.parametrize("settings", OF_PLAYING.values(), ids=OF_PLAYING)
def test_functions_of_playing_act_in_a_player_as_in_the_driver(tmp_path, settings):
    driver, player = (without_times(journal_of(played(tmp_path, number, **settings))) for number in (0, 1))
    assert driver == player


def players_of(pid):
    """The processes that play for a run."""
    return [child for child in descendants(pid) if b"agentrl.run.player" in words_of(child)]


@pytest.mark.faults
def test_a_player_that_is_killed_while_others_train_costs_no_prompt(tmp_path, capsys):
    """It stands still with its groups in flight, and is killed then."""
    killed = []

    def kill():
        journal = tmp_path / "players-2" / "metrics.jsonl"
        while not (journal.exists() and '"train/loss"' in journal.read_text()):
            time.sleep(0.01)
        killed.append(players_of(os.getpid())[0])
        os.kill(killed[0], signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    folder = played(tmp_path, 2, **LATE, num_rollout=8, quiet=False)
    thread.join(60)
    shown = " ".join(capsys.readouterr().out.split())
    assert len(killed) == 1
    assert "was ended by SIGKILL" in shown
    assert accounted(folder).trained > 0


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_no_player_and_its_run_goes_on(tmp_path, number):
    options = options_of("Talkative", tmp_path, "x", **{**SHORT, **LATE, "num_rollout": 200})
    values = {name.replace("_", "-"): value for name, value in options.items() if not isinstance(value, bool)}
    flags = [f"--{name}={value}" for name, value in values.items()]
    flags += ["--enable-deterministic-inference", "--num-rollout-workers=2"]
    command = [sys.executable, "-c", HEARING, "train", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '"train/loss"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    playing = players_of(process.pid)
    assert len(playing) == 2
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == (143 if number == signal.SIGTERM else -9), out
    while any(Path(f"/proc/{pid}").exists() for pid in playing):
        assert time.monotonic() < deadline + 60
        time.sleep(0.1)
    done = sum(1 for line in metrics.read_text().splitlines() if "train/loss" in line)
    resumed = train(
        "Talkative",
        tmp_path,
        "x",
        resume=True,
        **{**SHORT, **LATE, "num_rollout": done + 2, "num_rollout_workers": 2},
    )
    assert [attempt.ended for attempt in attempts(resumed.folder)][-1] == "finished"
    assert accounted(resumed.folder).trained > 0
