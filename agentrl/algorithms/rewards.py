"""Rewards on tokens: the rewards of an episode, and the penalty for divergence from a reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.controls import AdaptiveKl
from agentrl.algorithms.returns import discounted_returns
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores, verdicts_of
from agentrl.types import Group, Verdict

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

_MAX_LOG_RATIO = 20.0
_LOW_VAR_BOUND = 10.0


def token_rewards(groups: Sequence[Group], tokens: Tokens) -> Floats:
    """The rewards of each episode on its trainable tokens, [N]; they sum to `Verdict.total`.

    A turn's reward is on the last trainable token of the turn, the rest of the total on the last one of the
    episode, whichever sample that is in. The reward of a turn without trainable tokens is on the nearest
    token before it, else on the first one after. An episode without trainable tokens has no rewards here.

    Raises:
        ValueError: an episode is in no group, or a turn's reward is not finite.
    """
    rewards_N = np.zeros(len(tokens))
    bounds = tokens.bounds
    for e, verdict in enumerate(verdicts_of(groups, tokens.rollout_ids)):
        turn_n = tokens.turn_N[bounds[e] : bounds[e + 1]]
        if not len(turn_n):
            continue
        scored = scored_turns(verdict)
        last_n = np.searchsorted(turn_n, list(scored), side="right") - 1
        np.add.at(rewards_N, bounds[e] + np.maximum(last_n, 0), list(scored.values()))
        rewards_N[bounds[e + 1] - 1] += verdict.total - math.fsum(scored.values())
    return rewards_N


def scored_turns(verdict: Verdict) -> dict[int, float]:
    """The rewards of the turns that were scored, by the number of the turn.

    Raises:
        ValueError: a turn's reward is not finite.
    """
    scored = {k: reward for k, reward in enumerate(verdict.turn_rewards) if reward is not None}
    if not all(math.isfinite(reward) for reward in scored.values()):
        raise ValueError(f"episode {verdict.episode_id}: rewards of turns must be finite, got {scored}")
    return scored


def kl_estimate(logp_N: Floats, ref_logp_N: Floats, kind: KlKind) -> Floats:
    """Estimates of KL(policy, reference) from the tokens that the policy sampled, [N], in nats.

    With d = logp - ref_logp:

        k1          d                       unbiased; below 0 where the reference's logprob is higher
        k2          d^2 / 2                 biased, small variance
        k3          exp(-d) - 1 + d         unbiased, never below 0
        low_var_kl  k3, clipped to -10 .. 10

    In k3, d is clipped to -20 from below, so that nothing overflows.

    Source: J. Schulman, Approximating KL Divergence (2020), names and formulas; k3 as the penalty of
    GRPO: https://arxiv.org/abs/2402.03300, equation 4.
    """
    difference = logp_N - ref_logp_N
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    bounded = np.maximum(difference, -_MAX_LOG_RATIO)
    k3: Floats = np.expm1(-bounded) + bounded
    return np.clip(k3, -_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kind == "low_var_kl" else k3


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """The penalty for divergence from the reference, token by token: reward -= coef x k1.

    adaptive: what adapts the coefficient; None = it is kl_coef throughout.

    Only k1. A reward is multiplied by the score of its token, and the expectation of score x k1, summed
    from the token to the end of its episode, is the gradient of KL(policy, reference). With k2 or k3 it is
    the gradient of another function, which may have the opposite sign: https://arxiv.org/abs/2506.09477.

    Source: https://arxiv.org/abs/2203.02155, equation 2.
    """

    kl_coef: float
    adaptive: AdaptiveKl | None = None

    @property
    def coef(self) -> float:
        """The coefficient at present."""
        return self.kl_coef if self.adaptive is None else self.adaptive.coef

    def estimate(self, scores: TokenScores) -> Floats:
        """KL(old policy, reference) at each token, [N], in nats, before kl_coef.

        Raises:
            ValueError: there are no scores of a reference.
        """
        if scores.ref_N is None:
            raise ValueError(
                "a KL penalty needs the logprobs of a reference model; load one (ref_load), "
                "or set kl_coef to 0"
            )
        return kl_estimate(scores.proximal_N, scores.ref_N, "k1")


def penalties(
    kl: KlPenalty | None, tokens: Tokens, scores: TokenScores
) -> tuple[Floats, Mapping[str, float]]:
    """The KL penalty on the reward of each token, [N], and its metric."""
    if kl is None:
        return np.zeros(len(tokens)), {}
    estimate_N = kl.estimate(scores)
    return kl.coef * estimate_N, {"ref_kl": tokens.mean(estimate_N)}


def penalised(advantages_N: Floats, kl: KlPenalty | None, tokens: Tokens, scores: TokenScores) -> Advantages:
    """Advantages of `tokens`, [N], less the penalties from each token to the end of its rollout."""
    penalty_N, metrics = penalties(kl, tokens, scores)
    return Advantages(advantages_N - discounted_returns(penalty_N, tokens), metrics=metrics)
