"""A part about learning: how large a learning rate may be where tokens are one version old."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, cast

import agentrl
from agentrl.assembly.keywords import TrainSettings
from agentrl.records import read_metrics
from agentrl.records.diagnoses import read_diagnoses
from agentrl.types import JSON
from benchmarks.asynchronous.comparisons import OnEvent
from benchmarks.asynchronous.learning import Budget, held_out
from benchmarks.cache import cached_result
from benchmarks.config import AsyncBench

_LATE: Final[Mapping[str, JSON]] = {"max_staleness": 1}
SIDES: Final[Mapping[str, Mapping[str, JSON]]] = {
    "synchronous": {},
    "tis": {**_LATE, "correction": "tis"},
    "engine's logprobs": {**_LATE, "use_rollout_logprobs": True},
    "none": {**_LATE, "accept_bias": True},
}
_ESS: Final = "train/staleness_1/ess"
_STEADY: Final[Mapping[str, JSON]] = {"use_tensorboard": False, "num_threads": 1, "eval_interval": 1_000_000}


class World(NamedTuple):
    """An environment: it and its model, the settings of the warm start and of RL, and the rates."""

    model: Mapping[str, JSON]
    start: Mapping[str, JSON]
    rl: Mapping[str, JSON]
    rates: tuple[float, ...]


WORLDS: Final[Mapping[str, World]] = {
    "Buttons": World(
        {
            **{"env": "benchmarks.asynchronous.worlds:Buttons", "num_layers": 1, "hidden_size": 64},
            **{"ffn_hidden_size": 96, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 32},
            "vocab_size": 300,
        },
        {"warm_start_steps": 40, "warm_start_lr": 1e-2, "num_demonstrations": 256},
        {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "num_rollout": 14, "eval_episodes": 256},
        (2e-3, 4e-3, 8e-3),
    ),
    "Lamps": World(
        {
            **{"env": "benchmarks.asynchronous.worlds:Lamps", "num_layers": 2, "hidden_size": 64},
            **{"ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16},
            "vocab_size": 300,
        },
        {
            **{"warm_start_steps": 400, "warm_start_lr": 3e-3, "warm_start_batch_size": 32},
            "num_demonstrations": 512,
        },
        {
            **{"rollout_batch_size": 16, "n_samples_per_prompt": 8, "num_rollout": 30, "eval_episodes": 256},
            **{"lr_warmup_iters": 0, "lr_decay_style": "constant"},
        },
        (3e-4, 6e-4, 1.2e-3),
    ),
}


class Run(NamedTuple):
    """A training."""

    world: str
    side: str
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.world}, lr {self.lr:g}, {self.side}, seed {self.seed}"


def rates(bench: AsyncBench, on_event: OnEvent) -> dict[str, JSON]:
    """Held-out success after as many iterations, for each learning rate and treatment of stale tokens."""
    budget = Budget(bench.minutes)
    runs = [
        Run(name, side, lr, seed)
        for name, world in WORLDS.items()
        for seed in bench.seeds
        for lr in world.rates
        for side in SIDES
    ]
    rows = budget.rows({run: partial(_measured, bench, run, on_event) for run in runs})
    worlds: dict[str, JSON] = {
        name: {"model": dict(world.model), "start": dict(world.start), "rl": dict(world.rl)}
        for name, world in WORLDS.items()
    }
    sides: dict[str, JSON] = {side: dict(own) for side, own in SIDES.items()}
    return {
        "summary": {**rates_summary(rows), "left out": [*budget.left_out]},
        "runs": {str(run): row for run, row in rows.items()},
        "settings": {"worlds": worlds, "sides": sides, **_STEADY},
    }


def rates_summary(rows: Mapping[Run, dict[str, JSON]]) -> dict[str, JSON]:
    """For each world, learning rate and side: success (mean and worst over the seeds), the least ess, and how
    many runs were diagnosed as stale or collapsed."""
    summary: dict[str, JSON] = {}
    for world, lr, side in dict.fromkeys((run.world, run.lr, run.side) for run in rows):
        own = [row for run, row in rows.items() if (run.world, run.lr, run.side) == (world, lr, side)]
        success = [cast(float, row["success"]) for row in own]
        shares = [cast(float, row["ess"]) for row in own if row["ess"] is not None]
        summary[f"{world}, lr {lr:g}, {side}"] = {
            "success": statistics.fmean(success),
            "worst": min(success),
            "ess": min(shares, default=None),
            "told": sum(bool(row["diagnoses"]) for row in own),
            "runs": len(own),
        }
    return summary


def _measured(bench: AsyncBench, run: Run, on_event: OnEvent) -> dict[str, JSON]:
    world, folder = WORLDS[run.world], Path(bench.output_dir)
    begin = folder / f"rates-{run.world}-start-seed{run.seed}"
    base: dict[str, JSON] = {**_STEADY, **world.model, "seed": run.seed, "output_dir": bench.output_dir}

    def started() -> dict[str, JSON]:
        own: dict[str, JSON] = {**world.start, "num_rollout": 0, "eval_episodes": 1, "name": begin.name}
        _train({**base, **own})
        return {}

    cached_result(begin, {**base, **world.start}, started)
    name = f"rates-{run.world}-{run.lr:g}-{run.side.replace(chr(39), '').replace(' ', '-')}-seed{run.seed}"
    settings = {**base, **world.rl, **SIDES[run.side], "lr": run.lr}

    def trained() -> dict[str, JSON]:
        model: dict[str, JSON] = {"hf_checkpoint": str(begin / "checkpoint"), "warm_start_steps": 0}
        shape = world.model.keys() - {"env"}
        own = {key: value for key, value in settings.items() if key not in shape}
        _train({**own, **model, "name": name})
        records = read_metrics(folder / name / "metrics.jsonl")
        shares = [share for record in records if (share := record.get(_ESS)) is not None]
        made = [diagnosis.name for diagnosis in read_diagnoses(folder / name)]
        told: list[JSON] = [each for each in made if each in ("stale", "collapsed")]
        return {"success": held_out(records)[-1][1], "ess": min(shares, default=None), "diagnoses": told}

    row = cached_result(folder / name, settings, trained)
    on_event(f"{run}: {row['success']:.3f}")
    return row


def _train(settings: Mapping[str, JSON]) -> None:
    agentrl.train(resume=False, quiet=True, **cast(TrainSettings, settings))
