"""`cluster = "ray"` is all that changes: the run is the same, bit for bit, and its rank is on Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file

import agentrl
from agentrl.errors import ConfigError
from agentrl.records import reconcile
from agentrl.records.status import read_status
from agentrl.rollout.players import players as players_module
from agentrl.trainer.ranks import RankTrainer
from tests.engine.serving import sglang_python
from tests.flow.runs import HEARING, journal_of, metrics_of, options_of, train
from tests.flow.sft import conversations, settings_of, sft
from tests.flow.test_observed import events_of
from tests.flow.test_resume import accounted
from tests.flow.test_settings_act import without_times
from tests.trainer.megatron.launching import alive, descendants, wait_until, words_of

ROOT = Path(__file__).parents[2]

SETTINGS = {
    "num_rollout": 2,
    "warm_start_steps": 2,
    "warm_start_batch_size": 8,
    "eval_episodes": 8,
    "inline": False,
    "enable_deterministic_inference": True,
}
STARTING = {"importing", "joining the other GPUs", "loading weights", "allocating the cache", "warming up"}
MEASURED = ("rollout/raw_reward", "train/loss", "train/grad_norm")


def learned(folder):
    weights = load_file(folder / "checkpoint" / "model.safetensors")
    measured = [{name: row[name] for name in MEASURED if name in row} for row in metrics_of(folder)]
    return {name: tensor.numpy().tobytes() for name, tensor in weights.items()}, measured


def test_a_run_on_ray_is_the_run_on_this_machine_bit_for_bit(tmp_path):
    local = train("Bandit", tmp_path, "local", cluster="local", **SETTINGS)
    on_ray = train("Bandit", tmp_path, "ray", cluster="ray", num_cpus_per_rank=0.5, **SETTINGS)
    assert learned(on_ray.folder) == learned(local.folder)
    assert (on_ray.folder / "trainer" / "rank-0.log").exists()
    assert (on_ray.folder / "ray" / "logs" / "raylet.out").exists()
    assert "GET /" not in (on_ray.folder / "ray" / "head.log").read_text()
    assert 'cluster = "ray"' in (on_ray.folder / "config.toml").read_text()


@pytest.mark.full
def test_a_run_of_this_machine_resumes_on_ray_and_ends_as_if_it_had_been_there_always(tmp_path):
    whole = train("Bandit", tmp_path, "whole", cluster="local", **SETTINGS)
    begun = train("Bandit", tmp_path, "moved", cluster="local", **{**SETTINGS, "num_rollout": 1})
    on_ray = {"cluster": "ray", "num_cpus_per_rank": 0.5, "num_rollout": 2}
    moved = agentrl.train(begun.folder, resume=True, quiet=True, **on_ray)
    assert learned(moved.folder)[0] == learned(whole.folder)[0]


@pytest.mark.full
def test_a_run_with_players_on_ray_is_the_run_that_its_driver_plays(tmp_path):
    alone = train("Bandit", tmp_path, "alone", **SETTINGS)
    settings = {**SETTINGS, "num_rollout_workers": 2, "num_cpus_per_rollout_worker": 0.25}
    shared = train("Bandit", tmp_path, "ray", cluster="ray", num_cpus_per_rank=0.5, **settings)
    assert learned(shared.folder) == learned(alone.folder)
    assert without_times(journal_of(shared.folder)) == without_times(journal_of(alone.folder))
    assert len(list((shared.folder / "players").glob("player-*.log"))) == 2
    events = events_of(shared.folder / "timeline" / "attempt_1.json.gz")
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    machines = [title for title in titles.values() if re.search(r"\(process \d+ on 127\.0\.0\.1\)$", title)]
    assert [title.partition(" (")[0] for title in machines] == ["player 0", "player 1", "rank 0"]
    lanes = {(titles[e["pid"]].partition(" (")[0], e["name"]) for e in events if e["ph"] == "X"}
    assert {("rank 0", "update"), ("the run", "train")} <= lanes
    # One of them may have played all before the other was up.
    played = {what for who, what in lanes if who in ("player 0", "player 1")}
    assert {"group", "act"} <= played
    assert ("the run", "group") not in lanes
    assert reconcile(shared.folder).problems == ()


@pytest.mark.full
def test_two_ranks_of_torch_on_ray_learn_bit_for_bit_what_child_processes_learn(tmp_path):
    on_two = {**SETTINGS, "actor_num_gpus_per_node": 2}
    local = train("Bandit", tmp_path, "local", cluster="local", **on_two)
    on_ray = train("Bandit", tmp_path, "ray", cluster="ray", num_cpus_per_rank=0.5, **on_two)
    assert learned(on_ray.folder)[0] == learned(local.folder)[0]
    assert {path.name for path in (on_ray.folder / "trainer").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    assert reconcile(on_ray.folder).problems == ()


@pytest.mark.full
def test_sft_on_ray_is_sft_on_this_machine_bit_for_bit(tmp_path):
    conversations(tmp_path / "c.jsonl")
    settings = {**settings_of(tmp_path), "inline": False}
    local = sft(tmp_path / "local", **settings)
    on_ray = sft(tmp_path / "ray", **settings, cluster="ray", num_cpus_per_rank=0.5)
    assert on_ray.losses == local.losses
    assert learned(on_ray.folder)[0] == learned(local.folder)[0]


def test_a_run_that_ray_cannot_place_says_what_is_missing(tmp_path):
    asks = r"it asks for 1000 CPUs, each part of that on one machine, and it has \d+ CPUs?; add machines"
    with pytest.raises(ConfigError, match=asks):
        train("Bandit", tmp_path, "x", cluster="ray", num_cpus_per_rank=1000, **SETTINGS)


def trains_on_sglang(folder, world="Bandit", **settings):
    """A run whose rank and whose server are on Ray; returns the text of the server's log."""
    few = {"num_rollout": 2, "warm_start_steps": 2, "warm_start_batch_size": 8, "eval_episodes": 8}
    served = {"engine": "sglang", "sglang_python": str(sglang_python()), "inline": False}
    places = {"cluster": "ray", "num_cpus_per_rank": 0.5, "num_cpus_per_server": 0.5}
    result = train(world, folder, "ray", **{**few, **served, **places, **settings})
    rows = [row for row in metrics_of(result.folder) if "rollout/raw_reward" in row]
    assert len(rows) == 2
    assert all(row["engine/restarts"] == 0 for row in rows)
    assert reconcile(result.folder).problems == ()
    assert (result.folder / "trainer" / "rank-0.log").exists()
    processes = read_status(result.folder).processes
    assert re.fullmatch(r"process \d+ on 127\.0\.0\.1", processes["rank 0"].where)
    assert processes["server-0"].where.startswith("http://127.0.0.1:")
    _check_timeline(result.folder, rests=settings.get("colocate", False))
    return (result.folder / "engine" / "server-0.log").read_text()


def _check_timeline(folder, *, rests):
    """It has what the server and the rank did. rests: whether the server has no memory in their turns."""
    events = events_of(folder / "timeline" / "attempt_1.json.gz")
    pids = {e["args"]["name"].partition(" (")[0]: e["pid"] for e in events if e["name"] == "process_name"}
    stages = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == pids["server-0"]}
    assert "loading weights" in stages
    assert stages - STARTING == {"in service", "gets weights", *(["without memory"] if rests else [])}
    calls = {e["name"] for e in events if e["ph"] == "X" and e["pid"] == pids["rank 0"]}
    # The rank gathers the weights and sends them itself.
    assert {"build", "update", "gather"} < calls


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "colocate"), [("torch", False), ("torch", True), ("megatron", False)])
def test_a_run_on_sglang_and_ray_trains_and_its_audit_is_clean(tmp_path, trainer, colocate):
    log = trains_on_sglang(tmp_path, "Talkative", trainer=trainer, colocate=colocate)
    assert "host='127.0.0.1'" in log


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_controller_that_is_ended_leaves_nothing_on_ray_and_its_run_goes_on(tmp_path, number):
    late = {"max_staleness": 1, "correction": "tis", "save_interval": 1}
    settings = {**SETTINGS, **late, "num_rollout_workers": 1, "num_cpus_per_rollout_worker": 0.25}
    settings |= {"cluster": "ray", "num_cpus_per_rank": 0.5}
    options = options_of("Talkative", tmp_path, "x", **{**settings, "num_rollout": 200})
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if not isinstance(value, bool)
    ]
    command = [sys.executable, "-c", HEARING, "train", *flags, "--enable-deterministic-inference"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, deadline = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and '"train/loss"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = descendants(process.pid)
    names = b" ".join(word for pid in started for word in words_of(pid))
    assert all(part in names for part in (b"raylet", b"ray::ObjectHost", b"agentrl.run.player"))
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == (143 if number == signal.SIGTERM else -9), out
    wait_until(lambda: not any(alive(pid) for pid in started), message=lambda: str([*map(words_of, started)]))
    done = sum(1 for line in metrics.read_text().splitlines() if "train/loss" in line)
    resumed = train("Talkative", tmp_path, "x", resume=True, **{**settings, "num_rollout": done + 2})
    assert reconcile(resumed.folder).problems == ()


def hang_in_the_second_update(monkeypatch, seconds):
    """Its rank stands still for so long. Returns the list of ranks that did."""
    update, updates, hung = RankTrainer.update, count(1), []

    async def updated(self, batch):
        if next(updates) == 2:
            (rank,) = self.ranks.pids
            hung.append(rank)
            os.kill(rank, signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (rank, signal.SIGCONT)).start()
        return await update(self, batch)

    monkeypatch.setattr(RankTrainer, "update", updated)
    return hung


@pytest.mark.faults
def test_a_rank_that_hangs_is_named_and_a_player_that_does_is_replaced(tmp_path, monkeypatch, capsys):
    """The player stands still from the first trained step on, and for ever."""
    monkeypatch.setattr(players_module, "SILENT_S", 5.0)
    ranks, players = hang_in_the_second_update(monkeypatch, 10.0), []

    def hang_a_player():
        metrics = tmp_path / "x" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"train/loss"' in metrics.read_text())
        started = descendants(os.getpid())
        players.append(next(pid for pid in started if b"agentrl.run.player" in words_of(pid)))
        os.kill(players[0], signal.SIGSTOP)

    thread = threading.Thread(target=hang_a_player, daemon=True)
    thread.start()
    late = {"max_staleness": 1, "correction": "tis", "num_rollout": 6, "hang_warning_s": 2.0, "quiet": False}
    on_ray = {"cluster": "ray", "num_cpus_per_rank": 0.5, "num_cpus_per_rollout_worker": 0.25}
    settings = {"inline": False, "eval_episodes": 2, "num_rollout_workers": 2, **late, **on_ray}
    folder = train("Talkative", tmp_path, "x", **settings).folder
    thread.join(60)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"; the trainer waits for rank 0 (process {ranks[0]} on 127.0.0.1)" in shown
    assert re.search(r"player \d \(process \d+ on 127\.0\.0\.1\) has sent nothing for 5 s", shown)
    assert not alive(players[0])
    assert accounted(folder).trained > 0
