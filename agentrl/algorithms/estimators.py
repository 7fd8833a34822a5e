"""Estimators of the returns of each token, and adjustments of any estimator's advantages.

    ReinforcePlusPlus         returns of each token
    RoleConditioned           RAE: the reward less the role's mean so far
    Gae                       PPO: needs a critic
    Adjusted                  any estimator, with distillation, whitening, entropy control or a correction

Those that compare siblings are in `agentrl.algorithms.group_relative`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.controls import RoleBaselines
from agentrl.algorithms.corrections import Correction
from agentrl.algorithms.entropy import EntropyControl
from agentrl.algorithms.returns import Discount, discounted_returns, gae
from agentrl.algorithms.rewards import KlPenalty, penalised, penalties, token_rewards
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.types import Group

# Whitening of the advantages of a batch.
_EPSILON = 1e-8


def whiten(values_N: Floats) -> Floats:
    """Values of all trainable tokens of the batch with mean 0 and standard deviation 1, [N].

    whitened = (value - mean) / (std + 1e-8), std over the N tokens themselves (it divides by N). Values
    that are all equal, or a single one, have no scale: they become 0.

    Source: https://arxiv.org/abs/2501.03262, normalisation over the global batch.
    """
    if not len(values_N):
        return values_N.copy()
    if np.all(values_N == values_N[0]):
        # The mean of equal floats need not be equal to them.
        return np.zeros_like(values_N)
    whitened: Floats = (values_N - values_N.mean()) / (values_N.std() + _EPSILON)
    return whitened


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """Discounted returns of each token, KL in the reward; to be whitened over the batch (`Adjusted`).

    Groups may hold a single episode: none is compared with its siblings.

    Source: https://arxiv.org/abs/2501.03262.
    """

    gamma: float = 1.0
    discount: Discount = "token"
    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, a reward is not finite, scores are missing, or
                gamma is not between 0 and 1.
        """
        penalty_N, metrics = penalties(self.kl, tokens, scores)
        rewards_N = token_rewards(groups, tokens) - penalty_N
        returns_N = discounted_returns(rewards_N, tokens, gamma=self.gamma, discount=self.discount)
        return Advantages(returns_N, metrics=metrics)


@dataclass(frozen=True, slots=True)
class RoleConditioned:
    """Rollouts against the mean reward of their role so far: all tokens of a rollout have its advantage.

    advantage = reward - baseline of the role, before this batch is counted in it. Groups may hold a single
    episode: in self-play no other one had the same opponent.
    Source: https://arxiv.org/abs/2506.24119 (role-conditioned advantage estimation, SPIRAL).
    """

    baselines: RoleBaselines
    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, or scores are missing.
        """
        means = self.baselines.means
        outcomes = {
            verdict.rollout_id: verdict.total - means.get(verdict.agent, 0.0)
            for group in groups
            for verdict in group.verdicts
        }
        return penalised(tokens.spread(outcomes), self.kl, tokens, scores)


@dataclass(frozen=True, slots=True)
class Gae:
    """Generalised advantages of a critic, and the returns that it learns from: PPO.

    The value after the last token of a rollout is 0, or, where the scores have one (`Scores.ends`), the
    critic's: then an episode that was cut off is credited with what would have followed (F. Pardo et al.,
    Time limits in reinforcement learning, https://arxiv.org/abs/1712.00378).

    Source: https://arxiv.org/abs/1506.02438; see `agentrl.algorithms.returns.gae`.
    """

    gamma: float = 1.0
    lambd: float = 1.0
    discount: Discount = "token"
    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`, and returns.

        Raises:
            ValueError: a sample's episode is in no group, a reward is not finite, scores are missing, or
                gamma or lambd is not between 0 and 1.
        """
        if scores.values_N is None:
            raise ValueError(
                "PPO needs the values of a critic for every token; train one (estimator `ppo`), or "
                "choose an estimator without a critic, such as `grpo`"
            )
        penalty_N, metrics = penalties(self.kl, tokens, scores)
        advantages_N, returns_N = gae(
            token_rewards(groups, tokens) + self._bootstrapped(tokens, scores) - penalty_N,
            scores.values_N,
            tokens,
            gamma=self.gamma,
            lambd=self.lambd,
            discount=self.discount,
        )
        return Advantages(advantages_N, returns_N, metrics)

    def _bootstrapped(self, tokens: Tokens, scores: TokenScores) -> Floats:
        """The discounted value after the last token of each rollout that was cut off, on that token, [N]."""
        values_N = np.zeros(len(tokens))
        if scores.ends_E is not None:
            bounds = tokens.bounds
            has_tokens_E = bounds[1:] > bounds[:-1]
            values_N[bounds[1:][has_tokens_E] - 1] = self.gamma * scores.ends_E[has_tokens_E]
        return values_N


@dataclass(frozen=True, slots=True)
class Adjusted:
    """An estimator, and adjustments of its advantages, in this order.

    opd_kl_coef: on-policy distillation, advantage -= opd_kl_coef x (proximal - teacher logprob); the
        expectation of that difference is KL(policy, teacher). Source: https://arxiv.org/abs/2306.13649;
        the reverse KL as a reward: https://arxiv.org/abs/2306.08543.
    opd_only: that is all of the advantage; the estimator is not asked.
    normalize_advantages: whiten advantages over the rollout batch; a critic's returns keep their units.
    control: one of `agentrl.algorithms.entropy`, which takes the gradient of some tokens, or penalises it.
    correction: one of `agentrl.algorithms.corrections`; its factors multiply the advantages, and so only the
        policy's term: entropy, KL and values in the loss do not change, nor do the weights.
    """

    estimator: AdvantageEstimator
    opd_kl_coef: float = 0.0
    opd_only: bool = False
    normalize_advantages: bool = False
    control: EntropyControl | None = None
    correction: Correction | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: raised by the estimator; or logprobs of a teacher are missing.
        """
        if self.opd_only:
            estimated = Advantages(np.zeros(len(tokens)))
        else:
            estimated = self.estimator(groups, tokens, scores)
        advantages_N, metrics = estimated.advantages_N, dict(estimated.metrics)
        clipped_N = kl_cov_N = None
        if self.opd_kl_coef:
            gap_N = _teacher_gap(scores)
            advantages_N = advantages_N - self.opd_kl_coef * gap_N
            metrics["opd_kl"] = tokens.mean(gap_N)
        if self.normalize_advantages:
            advantages_N = whiten(advantages_N)
        if self.control is not None:
            factors_N, control_metrics, kl_cov_N = self.control(advantages_N, tokens, scores)
            advantages_N = advantages_N * factors_N
            metrics |= control_metrics
        if self.correction is not None:
            factors_N, correction_metrics, clipped_N = self.correction(tokens, scores)
            advantages_N = advantages_N * factors_N
            metrics |= correction_metrics
        return Advantages(advantages_N, estimated.returns_N, metrics, clipped_N, kl_cov_N)


def _teacher_gap(scores: TokenScores) -> Floats:
    if scores.teacher_N is None:
        raise ValueError(
            "on-policy distillation needs the logprobs of a teacher; name one (opd_teacher_load, "
            "opd_teacher_url, opd_teacher), or set opd_kl_coef to 0"
        )
    return scores.proximal_N - scores.teacher_N
