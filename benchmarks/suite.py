"""A benchmark of many environments with the embedded engine: wall time, and resumed after a kill at half.

All are processes of `agentrl benchmark` with a small model that has learned nothing: it writes up to the
limit of every turn, so the work is the same in each run. One process plays all cells. Another is killed
(SIGKILL) when half of the cells are finished; the third goes on with its folder, and its table has to be that
of the first.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import agentrl
from agentrl.types import JSON
from benchmarks.machine import machine

ENVS = (
    *("Blackjack-v0", "Calculator-v0", "CalendarQuestions-v0", "CliffWalking-v0", "FrozenLake-v0"),
    *("HopSearch-v0", "Taxi-v0", "TicTacToe-v0", "ReasoningGym-base_conversion-v0"),
    *("ReasoningGym-basic_arithmetic-v0", "ReasoningGym-caesar_cipher-v0", "ReasoningGym-chain_sum-v0"),
    *("ReasoningGym-count_primes-v0", "ReasoningGym-gcd-v0", "ReasoningGym-leg_counting-v0"),
    *("ReasoningGym-letter_counting-v0", "ReasoningGym-number_format-v0"),
    *("ReasoningGym-number_sorting-v0", "ReasoningGym-products-v0", "ReasoningGym-simple_equations-v0"),
)
"""Frozen: twenty environments."""
_LIMITS = ("--eval-max-response-len", "24", "--max-turns", "4")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SuiteSettings:
    """What is played. n: episodes of each environment (count)."""

    envs: Sequence[str] = ENVS
    n: int = 256


def bench_suite(settings: SuiteSettings = SuiteSettings()) -> dict[str, JSON]:
    """Play the suite whole, and killed at half and resumed.

    Returns:
        summary: wall seconds of both, the ratio of resumed to whole, whether the tables are equal. settings:
        of runs and machine.
    """
    with TemporaryDirectory(prefix="agentrl-suite-") as temporary:
        folder = Path(temporary)
        model = _model(folder)
        whole_s, whole = _timed(settings, model, folder / "whole")
        killed_s = _killed_at_half(settings, model, folder / "killed")
        resumed_s, resumed = _timed(settings, model, folder / "killed")
    summary: dict[str, JSON] = {
        "episodes": settings.n * len(settings.envs),
        "whole_s": whole_s,
        "killed_s": killed_s,
        "resumed_s": resumed_s,
        "resumed/whole": resumed_s / whole_s,
        "tables are equal": whole == resumed,
    }
    played: dict[str, JSON] = {"envs": list(settings.envs), "n": settings.n, "limits": list(_LIMITS)}
    return {"summary": summary, "settings": {**played, "machine": machine()}}


def _model(folder: Path) -> Path:
    """The directory of a model that has learned nothing."""
    result = agentrl.train(
        env="HopSearch-v0",
        output_dir=str(folder),
        num_rollout=0,
        warm_start_steps=1,
        warm_start_lr=1e-9,
        eval_episodes=1,
        use_tensorboard=False,
        quiet=True,
    )
    return result.folder / "checkpoint"


def _command(settings: SuiteSettings, model: Path, folder: Path) -> list[str]:
    words = ["benchmark", ",".join(settings.envs), "--model", str(model), "--n", str(settings.n), *_LIMITS]
    return [sys.executable, "-m", "agentrl.cli", *words, "--output-dir", str(folder), "--json"]


def _timed(settings: SuiteSettings, model: Path, folder: Path) -> tuple[float, list[JSON]]:
    """The wall time of a process that plays what the folder lacks (seconds), and its rows."""
    began = time.perf_counter()
    done = subprocess.run(_command(settings, model, folder), stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - began
    rows = cast(list[dict[str, JSON]], json.loads(done.stdout)["rows"])
    return seconds, [{name: value for name, value in row.items() if name != "folder"} for row in rows]


def _killed_at_half(settings: SuiteSettings, model: Path, folder: Path) -> float:
    """Start a process and kill it when half of its cells are finished; its wall time (seconds)."""
    began = time.perf_counter()
    with subprocess.Popen(_command(settings, model, folder), stdout=subprocess.DEVNULL) as process:
        while len(list(folder.glob("cells/*/result.json"))) < len(settings.envs) // 2:
            if process.poll() is not None:
                raise RuntimeError("the benchmark ended before it was killed")
            time.sleep(_POLL_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
    return time.perf_counter() - began
