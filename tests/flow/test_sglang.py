"""Training on real SGLang servers, on the CPU: an agent learns; a server that is killed costs no episode."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest

import agentrl
from agentrl.records import reconcile
from tests.engine.fleets import pids_at, send_signal
from tests.engine.serving import ROOT, sglang_python
from tests.flow.runs import HEARING, journal_of, metrics_of

RUN = ROOT / "examples" / "hop_search" / "run.toml"
GROUPS, SIZE = 16, 16
FEW = {
    "engine": "sglang",
    "rollout_batch_size": GROUPS,
    "n_samples_per_prompt": SIZE,
    "max_slots": 64,
}
STEPS = 10
ON_POLICY = 1e-3
"""How far logprobs of engine and trainer may be apart, in fp32."""


def iterations_of(folder):
    return [row for row in metrics_of(folder) if "rollout/raw_reward" in row]


def cached_share_by_turn(entry_list):
    """Over all episodes, by turn: the share of the prompt that the server had in its cache."""
    cached, prompts = defaultdict(int), defaultdict(int)
    for entry in entry_list:
        for trajectory in entry["episode"]["trajectories"]:
            prefix = 0
            for number, turn in enumerate(trajectory["turns"]):
                prefix += len(turn["tokens"]["world_ids"])
                prompts[number] += prefix
                cached[number] += turn["tokens"]["completion"].get("cached_tokens", 0)
                prefix += len(turn["tokens"]["completion"]["token_ids"])
    return [cached[number] / prompts[number] for number in sorted(prompts)]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    python = str(sglang_python())
    folder = str(tmp_path_factory.mktemp("runs"))
    return agentrl.train(
        RUN, quiet=True, output_dir=folder, sglang_python=python, num_rollout=STEPS, eval_episodes=128, **FEW
    )


@pytest.mark.learning
def test_an_agent_learns_hop_search_on_sglang(learned):
    rows = iterations_of(learned.folder)
    rewards = [row["rollout/raw_reward"] for row in rows]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    after_warm_start, after = learned.reports["after warm start"], learned.reports["after RL"]
    assert after["sampled"].mean > after_warm_start["sampled"].mean + 0.25
    assert after["greedy"].mean > 0.9
    for row in rows:
        assert 0.0 < row["train/train_rollout_logprob_abs_diff"] <= ON_POLICY
        assert (row["engine/restarts"], row["engine/lost"]) == (0.0, 0.0)
    first, *later = cached_share_by_turn(journal_of(learned.folder, "step_*"))
    assert all(share > max(first, 0.5) for share in later[:2]), (first, later)
    assert reconcile(learned.folder).problems == ()


@pytest.mark.learning
def test_an_evaluation_starts_a_server_of_its_own(learned, tmp_path):
    settings = {"engine": "sglang", "sglang_python": str(sglang_python()), "split": "validation", "n": 128}
    folder = tmp_path / "scored"
    arguments = {"max_running_requests": 32}
    model = str(learned.folder / "checkpoint")
    report = agentrl.evaluate(
        "HopSearch-v0", model, quiet=True, output_dir=str(folder), sglang=arguments, **settings
    )
    assert report.failures == {}
    assert abs(report.mean - learned.reports["after RL"]["sampled"].mean) < 0.15
    log = (folder / "engine" / "server-0.log").read_text()
    assert "max_running_requests=32" in log
    assert pids_at(int(re.search(r"port=(\d+)", log)[1])) == []


@pytest.mark.faults
def test_a_server_that_is_killed_in_mid_rollout_costs_no_episode(tmp_path):
    steps = 4
    flags = {
        **FEW,
        "rollout_batch_size": 32,
        "rollout_num_engines": 2,
        "num_rollout": steps,
        "eval_episodes": 32,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    words += [f"--output-dir={tmp_path}", f"--sglang-python={sglang_python()}", "--name=killed"]
    words += ["--warm-start-steps=120", "--num-demonstrations=3840"]
    command = [sys.executable, "-c", HEARING, "train", str(RUN), *words]
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
    folder = tmp_path / "killed"
    log = folder / "engine" / "server-0.log"
    try:
        waited(process, lambda: (folder / "metrics.jsonl").exists() and iterations_of(folder))
        victim = pids_at(int(re.search(r"port=(\d+)", log.read_text())[1]))
        assert len(victim) >= 3
        offset = len(log.read_text())
        # It says how many requests it decodes, every so many steps: tokens have come.
        waited(process, lambda: re.search(r"Decode batch, #running-req: [1-9]", log.read_text()[offset:]))
        send_signal(victim, signal.SIGKILL)
        assert process.wait(300) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    finally:
        process.kill()
    rows = iterations_of(folder)
    assert len(rows) == steps
    assert rows[-1]["engine/lost"] >= 1, "it struck while requests were on their way"
    assert rows[-1]["engine/restarts"] == 1
    assert "server-0: it " in " ".join((tmp_path / "out.txt").read_text().split())
    books = reconcile(folder)
    assert books.problems == ()
    assert books.played == books.trained + sum(books.dropped.values()) == steps * 32 * SIZE
    assert set(books.dropped) <= {"zero_std"}
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) <= ON_POLICY
    assert not any(os.path.exists(f"/proc/{pid}") for pid in victim)


def waited(process, true, within_s=240):
    until = time.monotonic() + within_s
    while not true():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < until
        time.sleep(0.02)
