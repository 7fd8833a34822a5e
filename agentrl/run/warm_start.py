"""The supervised start: a few epochs over demonstrations, through the same trainer as RL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from agentrl.algorithms.weights import token_mean
from agentrl.protocols import StepReport, Trainer
from agentrl.types import Credit, Sample, Scores, TrainBatch


async def warm_start(
    trainer: Trainer,
    demonstrations: Sequence[Sample],
    *,
    steps: int,
    batch_size: int,
    seed: int,
    progress: Callable[[StepReport], None],
) -> None:
    """Take `steps` supervised steps; every epoch shuffles the demonstrations anew."""
    order: list[Sample] = []
    shuffler = random.Random(f"warm start/{seed}")
    for _ in range(steps):
        while len(order) < batch_size:
            epoch = list(demonstrations)
            shuffler.shuffle(epoch)
            order = epoch + order
        batch, order = order[-batch_size:], order[:-batch_size]
        progress(await trainer.update(_imitation(batch)))
        # A trainer need not yield to the event loop; a cancellation (Ctrl-C) takes effect here.
        await asyncio.sleep(0)


def _imitation(samples: Sequence[Sample]) -> TrainBatch:
    """Demonstrations as a batch: weights of a token mean; advantages and old logprobs are not used."""
    zeros = tuple(sample.logprobs for sample in samples)
    return TrainBatch(tuple(samples), Scores(zeros), Credit(zeros, token_mean(samples)))
