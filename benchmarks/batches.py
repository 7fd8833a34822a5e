"""Batches of random tokens for trainers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.types import Credit, RolloutId, Sample, Scores, TrainBatch


def batch_of(lengths: Sequence[int], vocab: int) -> TrainBatch:
    """Samples of these lengths (tokens); the second half of each is trained on."""
    rng = np.random.default_rng(0)
    samples = tuple(_sample(rng, length, vocab) for length in lengths)
    share = 1 / sum(int(sample.loss_mask.sum()) for sample in samples)
    advantages = tuple((s.loss_mask * rng.normal(size=len(s))).astype(np.float32) for s in samples)
    weights = tuple((s.loss_mask * share).astype(np.float32) for s in samples)
    return TrainBatch(samples, Scores(tuple(s.logprobs for s in samples)), Credit(advantages, weights))


def _sample(rng: np.random.Generator, length: int, vocab: int) -> Sample:
    mask = np.arange(length) >= length // 2
    return Sample(
        token_ids=rng.integers(0, vocab, length).astype(np.int32),
        author=mask.astype(np.int8),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(vocab), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=np.zeros(length, np.int32),
        temperatures=np.ones(length, np.float32),
        rollout_id=RolloutId("bench"),
    )
