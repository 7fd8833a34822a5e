"""The price of a checkpoint: how long a run waits for it, and how long a resumed run takes to its first step.

copy       `Checkpoints.save` returns when weights and optimizer are copied: seconds, with the trainer in a
           rank of its own and in this process, against one copy of the same bytes into memory that is in use
           already. The write goes on meanwhile: seconds until it is complete, and of a step during it
resume     from the start of `agentrl train RUN --resume` in a new process to the reset of its first episode
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor

from agentrl.losses import PolicyLoss
from agentrl.run.checkpoints import Checkpoints, RunState
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.snapshots import Ranks
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.types import JSON, TrainBatch
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import num_parameters
from benchmarks.compare import Figures, figures_of
from benchmarks.engines.context import save, seeded
from benchmarks.machine import machine
from benchmarks.stall import Stall, batch_of, model_of
from benchmarks.stamped import HOLD

INLINE, RANK, COPY = "inline", "in a rank", "one copy in memory"
_ROOT = Path(__file__).parents[1]
_STATES = 3
"""Tensors of each parameter: the weight, and AdamW's two means."""
_PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class CheckpointLoad:
    """model: of the copies, and its batch. run: the shape of a new model of about the same size. Frozen."""

    model: Stall = field(
        default_factory=lambda: Stall(layers=14, width=768, vocab=4096, samples=1, tokens=8, threads=2)
    )
    run: Mapping[str, int] = field(
        default_factory=lambda: {
            "num-layers": 14,
            "hidden-size": 768,
            "ffn-hidden-size": 3072,
            "num-attention-heads": 12,
            "num-query-groups": 12,
            "kv-channels": 64,
        }
    )
    repeats: int = 5


def bench_checkpoint(
    load: CheckpointLoad | None = None, *, on_event: Callable[[str], None] = lambda _: None
) -> dict[str, JSON]:
    """Run both sections.

    Returns:
        summary: medians of the waits, their ratio to one copy, and the seconds of a resume. sections: by
        figure and side, the median, its spread and every repeat (seconds). settings: the workload and the
        machine.
    """
    load = load or CheckpointLoad()
    with TemporaryDirectory(prefix="agentrl-checkpoint-") as temporary:
        copies, num_bytes = asyncio.run(_copies(load, Path(temporary), on_event))
        resumes = _resumes(load, Path(temporary), on_event)
    sections = {**copies, "resume_s": resumes}
    waits = copies["wait_s"]
    return {
        "summary": {
            "wait_to_copy": {side: waits[side].median / waits[COPY].median for side in (RANK, INLINE)},
            "wait_s": {side: figures.median for side, figures in waits.items()},
            "step_s": {side: figures.median for side, figures in copies["step_s"].items()},
            "resume_s": {side: figures.median for side, figures in resumes.items()},
            "gigabytes": num_bytes / 1e9,
        },
        "sections": {
            name: {side: figures._asdict() for side, figures in sides.items()}
            for name, sides in sections.items()
        },
        "settings": {**cast(dict[str, JSON], json.loads(json.dumps(asdict(load)))), **machine()},
    }


async def _copies(
    load: CheckpointLoad, folder: Path, on_event: Callable[[str], None]
) -> tuple[dict[str, dict[str, Figures]], int]:
    """The figures of each side, and the bytes of the state."""
    model = save(seeded(lambda: model_of(load.model)), folder / "model")
    policy = Learning(PolicyLoss(), TrainerConfig(lr=1e-5), 1_000_000)
    plan = TorchPlan(policy=policy, models={"old": str(model)}, num_threads=load.model.threads)
    torch.set_num_threads(load.model.threads)
    copy = _MemoryCopy(_STATES * num_parameters(open_config(model)))
    batch = batch_of(load.model)
    seconds: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sides: dict[str, Ranks] = {INLINE: InlineRank(), RANK: Processes(1, folder / "ranks", preloaded=WORKER)}
    try:
        trainers = {side: await RankTrainer.started(ranks, plan) for side, ranks in sides.items()}
        # The first one has no optimizer state before, and its memory is new.
        await _round(trainers, batch, folder, 0)
        for repeat in range(1, load.repeats + 1):
            on_event(f"copy: repeat {repeat} of {load.repeats}")
            seconds["wait_s"][COPY].append(copy.seconds())
            for side, name, value in await _round(trainers, batch, folder, repeat):
                seconds[name][side].append(value)
    finally:
        for ranks in sides.values():
            await ranks.run(ranks.close)
    figures = {
        name: {side: figures_of(values) for side, values in by_side.items()}
        for name, by_side in seconds.items()
    }
    return figures, copy.num_bytes


async def _round(
    trainers: Mapping[str, RankTrainer], batch: TrainBatch, folder: Path, repeat: int
) -> list[tuple[str, str, float]]:
    """A checkpoint of each side, in an order that alternates: side, figure, seconds."""
    return [
        (side, name, value)
        for side in sorted(trainers, reverse=repeat % 2 == 1)
        for name, value in (
            await _saved(trainers[side], Checkpoints(folder / side, keep=1), batch, repeat)
        ).items()
    ]


async def _saved(
    trainer: RankTrainer, checkpoints: Checkpoints, batch: TrainBatch, step: int
) -> dict[str, float]:
    """Seconds of a step, of the wait for a checkpoint, of a step while it is written, until it is written."""
    update_s = await _timed_update(trainer, batch)
    state = RunState(
        attempt=1, step=step, version=step, source="x", next_ordinal=step, elapsed_s=0.0, records={}
    )
    began = time.perf_counter()
    await checkpoints.save(trainer, state)
    wait_s = time.perf_counter() - began
    during_s = await _timed_update(trainer, batch)
    await checkpoints.written()
    return {
        "wait_s": wait_s,
        "step_s": update_s,
        "step_during_the_write_s": during_s,
        "written_s": time.perf_counter() - began,
    }


async def _timed_update(trainer: RankTrainer, batch: TrainBatch) -> float:
    began = time.perf_counter()
    await trainer.update(batch)
    return time.perf_counter() - began


class _MemoryCopy:
    """Copies of `size` float32 values, in tensors of 8 MB, by as many threads as torch has here."""

    def __init__(self, size: int) -> None:
        self._sources = [torch.ones(min(2 << 20, size - start)) for start in range(0, size, 2 << 20)]
        self._targets: list[Tensor] = [source.clone() for source in self._sources]
        self.num_bytes = sum(source.nbytes for source in self._sources)

    def seconds(self) -> float:
        """The seconds of one copy."""
        began = time.perf_counter()
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)
        return time.perf_counter() - began


def _resumes(load: CheckpointLoad, folder: Path, on_event: Callable[[str], None]) -> dict[str, Figures]:
    """Seconds to the first step, with the trainer and the engine in processes of their own, and inline."""
    stamp = folder / "stamp"
    _train(
        *("--env", "benchmarks.stamped:Stamped", "--env-kwargs", json.dumps({"stamp": str(stamp)})),
        *("--output-dir", str(folder), "--name", "run", "--num-rollout", "1", "--rollout-batch-size", "1"),
        *("--n-samples-per-prompt", "2", "--rollout-max-response-len", "8", "--eval-episodes", "1"),
        *("--eval-interval", "1000", "--no-use-tensorboard"),
        *(word for name, value in load.run.items() for word in (f"--{name}", str(value))),
    ).wait(_PATIENCE_S)
    seconds: dict[str, list[float]] = {RANK: [], INLINE: []}
    for repeat in range(load.repeats):
        on_event(f"resume: repeat {repeat + 1} of {load.repeats}")
        for side in sorted(seconds, reverse=repeat % 2 == 1):
            flag = "--inline" if side == INLINE else "--no-inline"
            seconds[side].append(_seconds_to_first_step(folder / "run", stamp, flag))
    return {side: figures_of(values) for side, values in seconds.items()}


def _seconds_to_first_step(run: Path, stamp: Path, flag: str) -> float:
    stamp.unlink(missing_ok=True)
    began = time.perf_counter()
    process = _train(str(run), "--resume", "--num-rollout", "2", flag, **{HOLD: "1"})
    while not stamp.exists():
        if process.poll() is not None or time.perf_counter() - began > _PATIENCE_S:
            process.kill()
            raise AssertionError(f"the run in {run} did not begin a step (exit code {process.wait()})")
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    process.send_signal(signal.SIGTERM)
    process.wait(_PATIENCE_S)
    return seconds


def _train(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "agentrl.cli", "train", *arguments, "--quiet"]
    return subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
