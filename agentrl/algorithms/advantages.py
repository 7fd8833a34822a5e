"""From rewards to advantages, over the whole batch at once.

No KL, no value function, no shaping: an episode's outcome is credited to all its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.weights import token_mean
from agentrl.types import Credit, FloatArray, Group, Sample, Scores

_EPSILON = 1e-6


def group_advantages(rewards_G: Sequence[float], *, std_normalization: bool) -> npt.NDArray[np.float64]:
    """How much better each sibling did than their mean; exactly 0 where all did alike.

    Group-relative advantages (GRPO): https://arxiv.org/abs/2402.03300, equation for outcome
    supervision. The standard deviation is the sample's (G - 1), plus 1e-6. Without it: the
    mean-only form of https://arxiv.org/abs/2503.20783.

    Raises:
        ValueError: fewer than two siblings, or a reward that is not finite.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if len(rewards) < 2:
        raise ValueError("a group of one has nobody to be compared with; play at least 2 episodes a prompt")
    if not np.all(np.isfinite(rewards)):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if np.all(rewards == rewards[0]):
        # Not only faster: the mean of equal floats need not be equal to them.
        return np.zeros_like(rewards)
    centred: npt.NDArray[np.float64] = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + _EPSILON) if std_normalization else centred


@dataclass(frozen=True, slots=True)
class Grpo:
    """Group-relative advantages with token-mean weights: an `AdvantageEstimator`.

    The baseline counts episodes: one that has become several samples weighs no more than
    its siblings, and every one of its loss tokens gets the same advantage.
    """

    std_normalization: bool = True

    def __call__(self, groups: Sequence[Group], samples: Sequence[Sample], scores: Scores) -> Credit:
        """Credit for `samples`, whose episodes are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, or a group has no siblings.
        """
        del scores  # rewards are all that counts
        advantage_of = {
            episode.id: advantage
            for group in groups
            for episode, advantage in zip(group.episodes, self._of(group), strict=True)
        }
        strangers = sorted({sample.rollout_id for sample in samples} - advantage_of.keys())
        if strangers:
            raise ValueError(f"samples of episodes that are in no group: {strangers}")
        advantages = tuple(_spread(sample, advantage_of[sample.rollout_id]) for sample in samples)
        return Credit(advantages, token_mean(samples))

    def _of(self, group: Group) -> list[float]:
        rewards_G = [verdict.total for verdict in group.verdicts]
        advantages: list[float] = group_advantages(
            rewards_G, std_normalization=self.std_normalization
        ).tolist()
        return advantages


def _spread(sample: Sample, advantage: float) -> FloatArray:
    return sample.loss_mask.astype(np.float32) * np.float32(advantage)
