"""The cost of a step on a GPU: tokens a second, model FLOP utilisation, and memory.

Both trainers compute in bf16 and step in fp32, with the same attention inside the sequences. They do not fit
on the GPU together, so in every round one is built, warmed up, timed and released, and then the other.
Each has a process of its own: all of its memory is freed with it, and none of it is counted for the other.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch

from agentrl.errors import UserError
from agentrl.protocols import Trainer
from agentrl.types import JSON, TrainBatch
from benchmarks.engines.context import ResultRow, listed, spread
from benchmarks.megatron.context import MegatronContext, TrainerSetup, batch_of, torch_trainer
from benchmarks.megatron.flops import H100_BF16, forward_flops
from benchmarks.megatron.settings import BatchWorkload, GpuModel

_FORWARD_AND_BACKWARD = 3
_GIB = 1 << 30


class _Round(NamedTuple):
    """tokens_per_s: over all timed updates. used: bytes of GPU memory after them."""

    tokens_per_s: float
    used: int


_Side = Callable[[], Awaitable[_Round]]
"""Builds a trainer, times it, and stops it. `used` counts the memory of all processes on the GPU."""


async def bench(context: MegatronContext) -> list[ResultRow]:
    """A row for each model.

    Raises:
        UserError: there is no GPU.
    """
    if context.settings.gpu.device == "cuda" and not torch.cuda.is_available():
        raise UserError("Section gpu needs a GPU, and torch sees none; leave it out, or run it where one is.")
    return [await _row(model, context) for model in context.settings.gpu.models]


async def _row(model: GpuModel, context: MegatronContext) -> ResultRow:
    gpu = context.settings.gpu
    config = model.make_config()
    batch = batch_of(BatchWorkload(model.name, gpu.lengths), int(config.vocab_size))
    setup = TrainerSetup(model.name, model.make, gpu.row_tokens, bf16=True, device=gpu.device)
    sides: dict[str, _Side] = {
        "megatron": lambda: _megatron_round(setup, context, batch),
        "torch": lambda: _torch_round(setup, batch, gpu.updates),
    }
    rounds: dict[str, list[_Round]] = {side: [] for side in sides}
    for number in range(gpu.rounds):
        for side in sorted(sides, reverse=number % 2 == 1):
            rounds[side].append(await _round(sides[side], gpu.device))
    rates = {side: [r.tokens_per_s for r in side_rounds] for side, side_rounds in rounds.items()}
    medians = {side: statistics.median(values) for side, values in rates.items()}
    memory = {side: max(r.used for r in side_rounds) for side, side_rounds in rounds.items()}
    flops = (
        _FORWARD_AND_BACKWARD * forward_flops(config, gpu.lengths, batch.num_loss_tokens) / sum(gpu.lengths)
    )
    utilisation = {side: median * flops / H100_BF16 for side, median in medians.items()}
    ratio = medians["megatron"] / medians["torch"]
    line = (
        f"{ratio:.2f}x ({medians['megatron']:.0f} against {medians['torch']:.0f} tokens/s), target 1.0x; "
        f"{utilisation['megatron']:.0%} of {H100_BF16:.3g} FLOP/s{_target(model)}; "
        f"{memory['megatron'] / _GIB:.1f} GiB against {memory['torch'] / _GIB:.1f}"
    )
    context.on_event(f"gpu, {model.name}: {line}")
    sides_json: dict[str, JSON] = {
        side: {
            "tokens_per_s": listed(values),
            "median": medians[side],
            "spread": spread(values, medians[side]),
            "model_flop_utilisation": utilisation[side],
            "memory_bytes": memory[side],
        }
        for side, values in rates.items()
    }
    figures: dict[str, JSON] = {"device": gpu.device, "ratio": ratio, "flops_per_token": flops}
    return ResultRow(f"gpu, {model.name}", line, {**figures, "sides": sides_json})


def _target(model: GpuModel) -> str:
    return "" if model.utilisation is None else f", target {model.utilisation:.0%}"


async def _round(side: _Side, device: str) -> _Round:
    """used: GPU memory of this side, without that of other processes and of this one's CUDA context."""
    before = _used(device)
    measured = await side()
    return measured._replace(used=measured.used - before)


async def _megatron_round(setup: TrainerSetup, context: MegatronContext, batch: TrainBatch) -> _Round:
    with context.megatron_trainer(setup) as trainer:
        return await _timed(trainer, batch, setup.device, context.settings.gpu.updates)


async def _torch_round(setup: TrainerSetup, batch: TrainBatch, updates: int) -> _Round:
    """The torch trainer, in a process that ends with it."""
    # CUDA cannot be used after a fork.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        future = process.submit(_torch_round_inline, setup, batch, updates)
        return await asyncio.wrap_future(future)


def _torch_round_inline(setup: TrainerSetup, batch: TrainBatch, updates: int) -> _Round:
    torch.set_num_threads(1)
    return asyncio.run(_timed(torch_trainer(setup), batch, setup.device, updates))


async def _timed(trainer: Trainer, batch: TrainBatch, device: str, updates: int) -> _Round:
    await trainer.update(batch)
    started = time.perf_counter()
    for _ in range(updates):
        await trainer.update(batch)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(sample) for sample in batch.samples)
    return _Round(updates * num_tokens / seconds, _used(device))


def _used(device: str) -> int:
    """Bytes of GPU memory in use by all processes; both trainers keep the memory that they have allocated."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
