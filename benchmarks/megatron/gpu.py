"""What a step costs on a GPU: tokens a second, the share of what the card could do, and its memory.

Both trainers compute in bf16 and step in fp32, with the same attention inside the sequences. They would not
fit beside each other, so in every round one is built, warmed up, timed and let go of, and then the other.
Each has a process of its own: all of its memory goes with it, and none of it is counted for the other.
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
from benchmarks.engines.place import Row, listed, spread
from benchmarks.megatron.flops import H100_BF16, forward_flops
from benchmarks.megatron.place import Place, Work, batch_of, plain
from benchmarks.megatron.settings import GpuModel, Workload

_BACKWARD_TOO = 3
_GIB = 1 << 30


class _Round(NamedTuple):
    """tokens_per_s of the timed updates together; used: bytes of the card after them."""

    tokens_per_s: float
    used: int


_Side = Callable[[], Awaitable[_Round]]
"""Builds a trainer, times it, and ends it. It counts all that anybody has of the card."""


async def bench(place: Place) -> list[Row]:
    """A row for each model.

    Raises:
        UserError: there is no GPU.
    """
    if place.settings.gpu.device == "cuda" and not torch.cuda.is_available():
        raise UserError("Section gpu needs a GPU, and torch sees none; leave it out, or run it where one is.")
    return [await _row(model, place) for model in place.settings.gpu.models]


async def _row(model: GpuModel, place: Place) -> Row:
    gpu = place.settings.gpu
    config = model.make_config()
    batch = batch_of(Workload(model.name, gpu.lengths), int(config.vocab_size))
    work = Work(model.name, model.make, gpu.row_tokens, bf16=True, device=gpu.device)
    sides: dict[str, _Side] = {
        "megatron": lambda: _over_ranks(work, place, batch),
        "torch": lambda: _by_itself(work, batch, gpu.updates),
    }
    rounds: dict[str, list[_Round]] = {side: [] for side in sides}
    for number in range(gpu.rounds):
        for side in sorted(sides, reverse=number % 2 == 1):
            rounds[side].append(await _round(sides[side], gpu.device))
    rates = {side: [one.tokens_per_s for one in of] for side, of in rounds.items()}
    medians = {side: statistics.median(of) for side, of in rates.items()}
    memory = {side: max(one.used for one in of) for side, of in rounds.items()}
    flops = _BACKWARD_TOO * forward_flops(config, gpu.lengths, batch.num_loss_tokens) / sum(gpu.lengths)
    utilisation = {side: median * flops / H100_BF16 for side, median in medians.items()}
    ratio = medians["megatron"] / medians["torch"]
    line = (
        f"{ratio:.2f}x ({medians['megatron']:.0f} against {medians['torch']:.0f} tokens/s), target 1.0x; "
        f"{utilisation['megatron']:.0%} of {H100_BF16:.3g} FLOP/s{_target(model)}; "
        f"{memory['megatron'] / _GIB:.1f} GiB against {memory['torch'] / _GIB:.1f}"
    )
    place.on_event(f"gpu, {model.name}: {line}")
    told: dict[str, JSON] = {
        side: {
            "tokens_per_s": listed(of),
            "median": medians[side],
            "spread": spread(of, medians[side]),
            "model_flop_utilisation": utilisation[side],
            "memory_bytes": memory[side],
        }
        for side, of in rates.items()
    }
    figures: dict[str, JSON] = {"device": gpu.device, "ratio": ratio, "flops_per_token": flops}
    return Row(f"gpu, {model.name}", line, {**figures, "sides": told})


def _target(model: GpuModel) -> str:
    return "" if model.utilisation is None else f", target {model.utilisation:.0%}"


async def _round(side: _Side, device: str) -> _Round:
    """used: what it took of the card, beside what others have, this process with its context among them."""
    before = _used(device)
    found = await side()
    return found._replace(used=found.used - before)


async def _over_ranks(work: Work, place: Place, batch: TrainBatch) -> _Round:
    with place.spread(work) as trainer:
        return await _timed(trainer, batch, work.device, place.settings.gpu.updates)


async def _by_itself(work: Work, batch: TrainBatch, updates: int) -> _Round:
    """The torch trainer, in a process that ends with it."""
    # CUDA cannot be used after a fork.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        running = process.submit(_plainly, work, batch, updates)
        return await asyncio.wrap_future(running)


def _plainly(work: Work, batch: TrainBatch, updates: int) -> _Round:
    torch.set_num_threads(1)
    return asyncio.run(_timed(plain(work), batch, work.device, updates))


async def _timed(trainer: Trainer, batch: TrainBatch, device: str, updates: int) -> _Round:
    await trainer.update(batch)
    started = time.perf_counter()
    for _ in range(updates):
        await trainer.update(batch)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(sample) for sample in batch.samples)
    return _Round(updates * num_tokens / seconds, _used(device))


def _used(device: str) -> int:
    """Bytes of the card that anybody has; both trainers keep what they once needed."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
