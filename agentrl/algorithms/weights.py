"""Loss weights: computed once for a whole optimizer step, so that its split cannot change the gradient.

Each function takes the samples of a step, or those of each of its groups, and returns one float32 [T] array
for each sample, 0 off the loss mask. It is called with all that were played for the step: groups without
signal and tokens that a correction masks count in every denominator. loss = sum over all tokens of weight x
term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from agentrl.types import FloatArray, RolloutId, Sample

SampleWeights = Callable[[Sequence[Sample]], tuple[FloatArray, ...]]
WeightFunction = Callable[[Sequence[Sequence[Sample]]], tuple[FloatArray, ...]]
"""From the samples of each group to the weights of all of them, in their order."""


@dataclass(frozen=True, slots=True)
class CustomWeights:
    """The weights of a function, which are checked in every step."""

    function: WeightFunction

    def __call__(self, groups: Sequence[Sequence[Sample]]) -> tuple[FloatArray, ...]:
        """The weights of all samples, 0 off their loss masks.

        Raises:
            ValueError: it returned something else than a finite number, not below 0, for each token.
        """
        samples = [sample for group in groups for sample in group]
        returned = self.function(groups)
        if not isinstance(returned, Sequence) or len(returned) != len(samples):
            number = len(returned) if isinstance(returned, Sequence) else repr(returned)[:80]
            raise ValueError(f"a loss reducer returns weights of {len(samples)} samples, not of {number}")
        for sample, weights in zip(samples, returned, strict=True):
            if not isinstance(weights, np.ndarray) or weights.shape != (len(sample),):
                raise ValueError(f"a loss reducer returns one weight for each of the {len(sample)} tokens")
            if not (np.isfinite(weights).all() and (weights >= 0.0).all()):
                raise ValueError("a loss reducer returns weights that are not finite, or below 0")
        return tuple(
            np.where(sample.loss_mask, weights, 0.0).astype(np.float32)
            for sample, weights in zip(samples, returned, strict=True)
        )


def ungrouped(weights: SampleWeights) -> WeightFunction:
    """Weights that do not depend on the groups of the samples."""
    return partial(_of_all, weights)


def _of_all(weights: SampleWeights, groups: Sequence[Sequence[Sample]]) -> tuple[FloatArray, ...]:
    return weights([sample for group in groups for sample in group])


def token_mean(samples: Sequence[Sample]) -> tuple[FloatArray, ...]:
    """1 / (loss tokens of all samples) on every loss token: long episodes have more weight.

    Source: https://arxiv.org/abs/2503.14476, the token-level loss.
    """
    num_loss_tokens = sum(_counts(samples))
    weight = 1.0 / max(num_loss_tokens, 1)
    return _spread(samples, [weight] * len(samples))


def sample_mean(samples: Sequence[Sample]) -> tuple[FloatArray, ...]:
    """1 / (samples x loss tokens of this sample): every sample has the same weight.

    An episode of several samples counts several times; `rollout_mean` avoids that.
    A sample without loss tokens is counted, and its share is lost.
    Source: https://arxiv.org/abs/2402.03300, the loss of GRPO.
    """
    return _spread(samples, [1.0 / (len(samples) * max(count, 1)) for count in _counts(samples)])


def rollout_mean(samples: Sequence[Sample]) -> tuple[FloatArray, ...]:
    """1 / (episodes x loss tokens of this episode, over all its samples): every episode has the same weight.

    Splitting an episode into samples changes nothing. An episode without loss tokens is counted, and its
    share is lost.
    """
    tokens_of: dict[RolloutId, int] = {}
    for sample, count in zip(samples, _counts(samples), strict=True):
        tokens_of[sample.rollout_id] = tokens_of.get(sample.rollout_id, 0) + count
    shares = [1.0 / (len(tokens_of) * max(tokens_of[sample.rollout_id], 1)) for sample in samples]
    return _spread(samples, shares)


def prompt_mean(groups: Sequence[Sequence[Sample]]) -> tuple[FloatArray, ...]:
    """1 / (groups x loss tokens of this group): every prompt has the same weight.

    Inside a group it is the mean over tokens, so long siblings count for more. A group without loss tokens is
    counted, and its share is lost.
    Source: https://arxiv.org/abs/2510.13786, prompt-level aggregation (ScaleRL).
    """
    shares = [1.0 / (len(groups) * max(sum(_counts(group)), 1)) for group in groups]
    return tuple(
        weights
        for group, share in zip(groups, shares, strict=True)
        for weights in _spread(group, [share] * len(group))
    )


def constant(samples: Sequence[Sample], *, max_length: int) -> tuple[FloatArray, ...]:
    """1 / (episodes x max_length) on every loss token: weights do not depend on the lengths of episodes.

    max_length: the most tokens that one episode may hold, those of the environment included (tokens), the
        same throughout a run. Its size scales the gradient and changes nothing else.
    Source: https://arxiv.org/abs/2503.20783, Dr. GRPO.

    Raises:
        ValueError: max_length is below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1 token, got {max_length}")
    num_episodes = len({sample.rollout_id for sample in samples})
    weight = 1.0 / (max(num_episodes, 1) * max_length)
    return _spread(samples, [weight] * len(samples))


def _counts(samples: Sequence[Sample]) -> list[int]:
    return [int(sample.loss_mask.sum()) for sample in samples]


def _spread(samples: Sequence[Sample], weights: Sequence[float]) -> tuple[FloatArray, ...]:
    return tuple(
        sample.loss_mask.astype(np.float32) * np.float32(weight)
        for sample, weight in zip(samples, weights, strict=True)
    )
