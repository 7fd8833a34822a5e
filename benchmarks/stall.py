"""The cost of an optimizer step for other tasks: the longest stall of the event loop during an update.

Two trainers make the same step of the same model, repeat by repeat in turns: one in the process of the loop
(`inline`, the baseline), one in a rank of its own, as runs do. Meanwhile a task of the loop wakes up every
10 ms; its greatest delay is the stall.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.losses import PolicyLoss
from agentrl.run.stages import LagMeter
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.snapshots import Ranks
from agentrl.trainer.torch.plan import WORKER, TorchPlan
from agentrl.types import JSON, Credit, RolloutId, Sample, Scores, TrainBatch
from agentrl.weights.hf.source import open_config
from agentrl.weights.hf.tensors import num_parameters
from benchmarks.engines.context import save, seeded
from benchmarks.machine import machine

INLINE, RANK = "inline", "in a rank"


@dataclass(frozen=True, slots=True)
class Stall:
    """The model and the batch. samples: of the batch; tokens: of a sample; threads: of torch (counts)."""

    layers: int = 7
    width: int = 512
    vocab: int = 8192
    samples: int = 32
    tokens: int = 64
    threads: int = 1
    repeats: int = 5


def bench_stall(stall: Stall | None = None) -> dict[str, JSON]:
    """The longest stall of both sides, over interleaved repeats.

    Returns:
        summary: longest_stall_ms of a rank, and of the baseline. rows: the stall and the seconds of every
        step. settings: of runs and machine.
    """
    return asyncio.run(_bench(stall or Stall()))


async def _bench(stall: Stall) -> dict[str, JSON]:
    with TemporaryDirectory(prefix="agentrl-stall-") as temporary:
        folder = Path(temporary)
        model = save(seeded(lambda: model_of(stall)), folder / "model")
        policy = Learning(PolicyLoss(), TrainerConfig(lr=1e-5, max_tokens_per_gpu=1024), 1_000_000)
        plan = TorchPlan(policy=policy, models={"old": str(model)}, num_threads=stall.threads)
        sides: dict[str, Ranks] = {
            INLINE: InlineRank(),
            RANK: Processes(1, folder / "ranks", preloaded=WORKER),
        }
        try:
            trainers = {side: await RankTrainer.started(ranks, plan) for side, ranks in sides.items()}
            rows = await _measured(trainers, stall)
        finally:
            for ranks in sides.values():
                await ranks.run(ranks.close)
        parameters = num_parameters(open_config(model))
    longest = {side: max(row["stall_ms"] for row in rows[side]) for side in rows}
    return {
        "summary": {
            "longest_stall_ms": longest[RANK],
            "longest_stall_ms_inline": longest[INLINE],
            "step_s": statistics.median(row["step_s"] for row in rows[RANK]),
            "parameters": parameters,
        },
        "rows": {side: [dict(row) for row in side_rows] for side, side_rows in rows.items()},
        "settings": {**asdict(stall), "parameters": parameters, "baseline": INLINE, **machine()},
    }


async def _measured(trainers: dict[str, RankTrainer], stall: Stall) -> dict[str, list[dict[str, float]]]:
    batch = batch_of(stall)
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in trainers}
    for repeat in range(-1, stall.repeats):
        for side in sorted(trainers, reverse=repeat % 2 == 1):
            async with LagMeter() as meter:
                await asyncio.sleep(0.05)
                meter.take()
                began = time.perf_counter()
                await trainers[side].update(batch)
                step_s = time.perf_counter() - began
                # The meter wakes up first, even if it is late.
                await asyncio.sleep(0.02)
                row = {"stall_ms": 1000 * meter.take(), "step_s": step_s}
            # The first step of a process is slower than any other.
            if repeat >= 0:
                rows[side].append(row)
    return rows


def model_of(stall: Stall) -> PreTrainedModel:
    """The model, with weights from torch's generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=stall.vocab,
            hidden_size=stall.width,
            intermediate_size=4 * stall.width,
            num_hidden_layers=stall.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=stall.width // 8,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def batch_of(stall: Stall) -> TrainBatch:
    """A batch with random tokens and advantages."""
    rng = np.random.default_rng(0)
    samples = tuple(_sample(rng, stall, number) for number in range(stall.samples))
    advantages = tuple((s.loss_mask * rng.normal(size=len(s))).astype(np.float32) for s in samples)
    weights = tuple((s.loss_mask / (stall.samples * stall.tokens)).astype(np.float32) for s in samples)
    return TrainBatch(samples, Scores(tuple(s.logprobs for s in samples)), Credit(advantages, weights))


def _sample(rng: np.random.Generator, stall: Stall, number: int) -> Sample:
    mask = np.arange(stall.tokens) > 0
    return Sample(
        token_ids=rng.integers(0, stall.vocab, stall.tokens).astype(np.int32),
        author=mask.astype(np.int8),
        loss_mask=mask,
        logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.zeros(stall.tokens, np.int32),
        temperatures=np.ones(stall.tokens, np.float32),
        rollout_id=RolloutId(f"s{number}"),
    )
