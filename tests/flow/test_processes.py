"""A run in processes of its own learns what a run inline learns, and leaves none of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.flow.runs import WARM, metrics_of, train
from tests.trainer.megatron.launching import descendants

SHORT = {**WARM, "num_rollout": 2, "eval_episodes": 16, "eval_interval": 5, "num_threads": 1}


@pytest.mark.full
def test_a_run_learns_the_same_inline_and_in_processes(tmp_path):

    before = set(descendants(os.getpid()))
    runs = [
        train("Bandit", tmp_path, f"inline-{inline}", inline=inline, **SHORT).folder
        for inline in (True, False)
    ]
    assert set(descendants(os.getpid())) <= before
    warm = [(folder / "checkpoint-warm-start" / "model.safetensors").read_bytes() for folder in runs]
    assert warm[0] == warm[1]
    # The engine's batches come together otherwise, which shows in a logprob's last digits.
    steps = [[row for row in metrics_of(folder) if "train/loss" in row] for folder in runs]
    for inline, in_processes in zip(*steps, strict=True):
        for name in ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/pg_clipfrac"):
            assert inline[name] == pytest.approx(in_processes[name], rel=1e-3, abs=1e-5), name
    lags = [row["perf/event_loop_lag_max"] for row in metrics_of(runs[1]) if "train/loss" in row]
    assert len(lags) == 2
    assert all(lag >= 0 for lag in lags)
    assert_logs(runs[1])


def assert_logs(folder: Path) -> None:
    for log in (folder / "engine" / "engine.log", folder / "trainer" / "rank-0.log"):
        assert "Traceback" not in log.read_text()
