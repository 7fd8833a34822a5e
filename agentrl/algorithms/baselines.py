"""Baselines over the siblings of one group.

Each takes the total rewards of a group's G episodes and returns their G advantages, float64. A group may have
any size. The advantage of a single member is 0, and so are those of rewards that are all equal, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.tokens import Floats

Rewards = Sequence[float] | npt.NDArray[np.float64]
Baseline = Callable[[Rewards], Floats]

_EPSILON = 1e-6
_LARGEST_REWARD = 1e30


def grpo(rewards_G: Rewards, *, std_normalization: bool = True) -> Floats:
    """How much better each sibling did than their mean, in standard deviations of the group.

    advantage = (reward - mean) / (std + 1e-6), std being the sample's (it divides by G - 1).

    Source: https://arxiv.org/abs/2402.03300, outcome supervision. Without `std_normalization`: `dr_grpo`.

    Raises:
        ValueError: a reward that is not finite, or beyond 1e30.
    """
    rewards = _checked(rewards_G)
    if _alike(rewards):
        return np.zeros_like(rewards)
    centred: Floats = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + _EPSILON) if std_normalization else centred


def dr_grpo(rewards_G: Rewards) -> Floats:
    """How much better each sibling did than their mean: advantage = reward - mean.

    Dividing by the standard deviation would favour tasks that are nearly always, or nearly never, solved.
    Source: https://arxiv.org/abs/2503.20783.

    Raises:
        ValueError: a reward that is not finite, or beyond 1e30.
    """
    return grpo(rewards_G, std_normalization=False)


def rloo(rewards_G: Rewards) -> Floats:
    """How much better each sibling did than the mean of the others (leave one out).

    advantage = reward - mean of the other G - 1. No episode is in its own baseline, so the gradient is
    unbiased; it is `dr_grpo` times G / (G - 1). Source: https://arxiv.org/abs/2402.14740.

    Raises:
        ValueError: a reward that is not finite, or beyond 1e30.
    """
    rewards = _checked(rewards_G)
    if _alike(rewards):
        return np.zeros_like(rewards)
    advantages: Floats = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return advantages


def maxrl(rewards_G: Rewards) -> Floats:
    """How much better each sibling did than their mean, in units of that mean; 0 where all failed.

    advantage = (reward - mean) / mean. With rewards of 0 and 1 its expectation is the gradient of the
    log-likelihood of success, cut off at order G: the rarer a success, the more it counts.
    Source: https://arxiv.org/abs/2602.02710.

    Raises:
        ValueError: a reward below 0, not finite, or beyond 1e30.
    """
    rewards = _checked(rewards_G)
    if np.any(rewards < 0):
        raise ValueError(
            f"maxrl divides by the mean reward, so rewards must be 0 or more, got {rewards.tolist()}; "
            "use another baseline, or score successes 1 and failures 0"
        )
    if _alike(rewards):
        return np.zeros_like(rewards)
    # Scaled to 0 .. 1 first: the mean of the smallest floats would be 0.
    scaled = rewards / rewards.max()
    advantages: Floats = (scaled - scaled.mean()) / scaled.mean()
    return advantages


def grpo_passk(rewards_G: Rewards, *, std_normalization: bool = True) -> Floats:
    """Only the best sibling has an advantage: what it adds to the best of the others.

    advantage = largest reward - second largest, divided by (std + 1e-6) as in `grpo`; 0 for all others. It
    estimates the gradient of the largest of G rewards (pass@G, where they are 0 and 1): a group in which two
    siblings solve the task has none. Source: https://arxiv.org/abs/2503.19595.

    Raises:
        ValueError: a reward that is not finite, or beyond 1e30.
    """
    rewards = _checked(rewards_G)
    advantages = np.zeros_like(rewards)
    if _alike(rewards):
        return advantages
    second, best = np.argsort(rewards, kind="stable")[-2:]
    scale = rewards.std(ddof=1) + _EPSILON if std_normalization else 1.0
    advantages[best] = (rewards[best] - rewards[second]) / scale
    return advantages


BASELINES: dict[str, Baseline] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "grpo_passk": grpo_passk,
}
"""Baselines by their names in a configuration."""


def _checked(rewards_G: Rewards) -> Floats:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    # Beyond it, squares of differences and the float32 of the trainer would overflow.
    if not np.all(np.abs(rewards) <= _LARGEST_REWARD):
        raise ValueError(f"rewards must be finite, and at most 1e30 in size, got {rewards.tolist()}")
    return rewards


def _alike(rewards: Floats) -> bool:
    # Not only faster: the mean of equal floats need not be equal to them.
    return len(rewards) < 2 or bool(np.all(rewards == rewards[0]))
