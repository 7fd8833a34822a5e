"""Whole steps of runs, from a small model that was warm-started: where the time of a step goes.

Each is `agentrl train` of HopSearch with Megatron and a server that runs already: side by side, colocated
(the two take turns), asynchronous (the next batch is played while one is trained on).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, cast

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.errors import AgentRLError
from agentrl.types import JSON
from benchmarks.compare import figures_of
from benchmarks.gpu.job import Bench, Turn
from benchmarks.gpu.server import RUNS

_RUN_FILE = "examples/hop_search/run.toml"
SIDES: Final[Mapping[str, Mapping[str, JSON]]] = {
    "side by side": {},
    "colocated": {"colocate": True},
    "asynchronous": {"max_staleness": 1, "correction": "tis"},
}
_STEPS = 6
_LEAST_S = 25.0
_STEP = "perf/step_time"
_PHASES: Final = {
    "rollout": "perf/rollout_time",
    "logprobs": "perf/log_probs_time",
    "training": "perf/actor_train_time",
    "weights": "perf/update_weights_time",
    "switching": "perf/offload_time",
    "waiting for data": "perf/train_wait_time",
}
_TOKENS: Final = {"rollout": "perf/rollout_tok_per_s", "training": "perf/actor_train_tok_per_s"}


async def run(bench: Bench) -> None:
    """A row for each kind of run."""
    turn = bench.turn()
    bench.quiet()
    for name, settings in SIDES.items():
        if bench.left_s < (0 if bench.spec.tiny else _LEAST_S):
            bench.note(f"no time for a run {name}")
            continue
        try:
            await _row(bench, turn, name, settings)
        except AgentRLError as error:
            bench.row(name, f"failed: {error}", {"error": str(error)})


async def _row(bench: Bench, turn: Turn, name: str, settings: Mapping[str, JSON]) -> None:
    started = time.perf_counter()
    label = name.replace(" ", "-")
    own: dict[str, JSON] = {
        "output_dir": str(bench.folder / "runs"),
        "name": f"{label}-{time.time_ns()}",
        **_settings(bench, turn),
        **settings,
    }
    result = await asyncio.to_thread(
        partial(agentrl.train, _RUN_FILE, resume=False, quiet=True, **cast(TrainSettings, own))
    )
    wall_s = time.perf_counter() - started
    steps = _steps(result.folder)
    seconds = figures_of([step[_STEP] for step in steps])
    spent = {phase: _mean(steps, key) for phase, key in _PHASES.items()}
    tokens = {side: _mean(steps, key) for side, key in _TOKENS.items()}
    shares = ", ".join(f"{phase} {s / seconds.median:.0%}" for phase, s in spent.items() if s > 0)
    line = (
        f"{seconds.median:.2f} s a step (median of {len(steps)}, spread {seconds.spread:.0%}): {shares}; "
        f"{tokens['rollout']:,.0f} tokens/s sampled, {tokens['training']:,.0f} trained on"
    )
    figures: dict[str, JSON] = {
        "step_s": seconds._asdict(),
        "spent_s": {**spent},
        "tokens_per_s": {**tokens},
        "wall_s": wall_s,
    }
    bench.row(name, line, figures, {"step_s": seconds.median})


def _settings(bench: Bench, turn: Turn) -> dict[str, JSON]:
    """The settings that all kinds of runs have. Without a server the embedded engine samples, on the CPU."""
    tiny = bench.spec.tiny
    settings: dict[str, JSON] = {
        "hf_checkpoint": turn.models["warm"],
        "warm_start_steps": 0,
        "trainer": "megatron",
        "bf16": not tiny,
        "num_rollout": 3 if tiny else _STEPS + 1,
        "eval_interval": 1000,
        "eval_episodes": 4 if tiny else 64,
        "use_tensorboard": False,
    }
    if tiny:
        # A model that has learned nothing gives no signal; entropy is trained on all the same.
        settings |= {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "entropy_coef": 0.01}
    if RUNS in turn.urls:
        settings |= {"engine": "sglang", "sglang_url": turn.urls[RUNS]}
    return settings


def _steps(folder: Path) -> Sequence[Mapping[str, float]]:
    """The metrics of each iteration but the first, which warms up."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if _STEP in row]
    return steps[1:]


def _mean(steps: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.fmean(step.get(key) or 0.0 for step in steps)
