"""Supervised training, of a warm start and of SFT: batches in a shuffled order, one loss, held-out loss."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import numpy as np

from agentrl.algorithms.weights import token_mean
from agentrl.types import Credit, Sample, Scores, TrainBatch
from agentrl.types.seams import StepReport, Trainer


def shuffled_batches(n: int, batch_size: int, *, seed: int, total: int) -> Iterator[list[int]]:
    """Batches of the numbers 0 ... n - 1, `total` numbers in all; the last batch may be smaller.

    Every epoch goes through all numbers, in an order of its own. A batch may hold the end of an epoch and the
    beginning of the next.
    """
    order: list[int] = []
    shuffler = random.Random(f"warm start/{seed}")
    for begin in range(0, total, batch_size):
        size = min(batch_size, total - begin)
        while len(order) < size:
            epoch = list(range(n))
            shuffler.shuffle(epoch)
            order = epoch + order
        yield order[-size:]
        del order[-size:]


async def imitate(trainer: Trainer, batches: Iterable[Sequence[Sample]]) -> AsyncIterator[StepReport]:
    """Take one optimizer step for each batch; the loss is the mean over its loss tokens.

    Raises:
        TrainerError: a process of the trainer failed.
    """
    for batch in batches:
        yield await trainer.update(_imitation(batch))
        # A trainer need not yield to the event loop; a cancellation (Ctrl-C) takes effect here.
        await asyncio.sleep(0)


async def held_out_loss(trainer: Trainer, samples: Sequence[Sample], *, batch_size: int) -> float:
    """The mean of - logprob over the loss tokens of the samples, under the current weights (nats).

    batch_size: samples that are sent to the trainer at once (count).

    Raises:
        TrainerError: a process of the trainer failed.
    """
    total, count = 0.0, 0
    for begin in range(0, len(samples), batch_size):
        part = samples[begin : begin + batch_size]
        scores = await trainer.score(part)
        for sample, logprobs in zip(part, scores.proximal, strict=True):
            total -= float(logprobs[sample.loss_mask].sum(dtype=np.float64))
            count += int(sample.loss_mask.sum())
        # As above.
        await asyncio.sleep(0)
    return total / count


def _imitation(samples: Sequence[Sample]) -> TrainBatch:
    """Demonstrations as a batch: weights of a token mean; advantages and old logprobs are not used."""
    zeros = tuple(sample.logprobs for sample in samples)
    return TrainBatch(tuple(samples), Scores(zeros), Credit(zeros, token_mean(samples)))
