"""Credit turn by turn: each turn is compared with the same turn of the siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from agentrl.algorithms.baselines import rloo
from agentrl.algorithms.rewards import scored_turns
from agentrl.algorithms.tokens import Floats
from agentrl.types import Rollout


def returns_to_go(siblings: Sequence[Rollout], *, gamma: float = 1.0) -> list[Floats]:
    """The return of each sibling from each of its turns on: one float64 [K] for each.

    siblings: rollouts in one role of a group, see `Group.siblings`.

    Rewards of turns count at their turn, the rest of the total at the last one; gamma discounts from turn to
    turn. An episode has one return for each turn, also for turns without trainable tokens.

    Raises:
        ValueError: a turn's reward is not finite.
    """
    returns = []
    for episode, verdict in siblings:
        rewards_K = np.zeros(max(len(episode.turns_of(verdict.agent)), 1))
        scored = {k: reward for k, reward in scored_turns(verdict).items() if k < len(rewards_K)}
        rewards_K[list(scored)] = list(scored.values())
        rewards_K[-1] += verdict.total - math.fsum(scored.values())
        for k in range(len(rewards_K) - 2, -1, -1):
            rewards_K[k] += gamma * rewards_K[k + 1]
        returns.append(rewards_K)
    return returns


def turn_advantages(returns_GK: Sequence[Floats]) -> list[Floats]:
    """Each turn's return minus the mean return of the other siblings from the same turn on.

    advantage[i, k] = return[i, k] - mean over j != i, j having reached turn k, of return[j, k]

    Where no other reached turn k, their returns from the start are the baseline. A group of one gets 0.

    The gradient of the expected return is the expectation of the sum over turns of
    score(action k) x (return[k] - b), for any b that does not depend on action k. The b above depends on
    other episodes only. They were played independently of this one, so given the history before turn k, b is
    independent of action k and of the rest of this episode, and the expectation of score x b is 0. That holds
    although the policy decides how many turns there are: whether this episode has a turn k is settled before
    its action k, and how many others have one does not depend on it.

    A mean over all turns of the group is no such b: it contains this episode's own returns, and this
    episode's decision to continue adds turns to it, so it depends on action k. Nor is the mean over turn k
    with this episode in it: that multiplies a turn's credit by (n - 1) / n, n being how many reached it; the
    factor is smallest for turns that few reach, and 0 where only one did.

    Source: the baseline that is independent of the action, https://arxiv.org/abs/1506.02438, section 2; leave
    one out over whole episodes, https://arxiv.org/abs/2402.14740.

    Args:
        returns_GK: for each sibling, its return from each of its turns on.

    Raises:
        ValueError: a return that is not finite, or beyond 1e30.
    """
    totals_G = np.array([returns_K[0] for returns_K in returns_GK])
    advantages = [np.zeros_like(returns_K) for returns_K in returns_GK]
    if len(returns_GK) < 2:
        return advantages
    for k in range(max(len(returns_K) for returns_K in returns_GK)):
        reached = [i for i, returns_K in enumerate(returns_GK) if len(returns_K) > k]
        for i, advantage in zip(reached, _compared(returns_GK, reached, k, totals_G), strict=True):
            advantages[i][k] = advantage
    return advantages


def _compared(returns_GK: Sequence[Floats], reached: Sequence[int], k: int, totals_G: Floats) -> list[float]:
    """The advantages at turn k of the siblings that reached it."""
    if len(reached) > 1:
        advantages: list[float] = rloo(np.array([returns_GK[i][k] for i in reached])).tolist()
        return advantages
    (only,) = reached
    others = np.delete(totals_G, only)
    # The mean of differences, not the difference of means: equal floats give 0 exactly.
    return [float(np.mean(returns_GK[only][k] - others))]
