"""Advantage estimators: each an `AdvantageEstimator` over the complete rollout batch.

    GroupRelative             GRPO, Dr. GRPO, RLOO, MaxRL, GPG, pass@k: one advantage for a whole episode
    RewardDecoupled           GDPO: each of several rewards against its own siblings
    LengthWeighted            OPO: the same, with a mean in which long episodes count for more
    TurnRelative              the same, turn by turn
    ReinforcePlusPlus         returns of each token
    Gae                       PPO: needs a critic
    Adjusted                  one of them, and distillation, whitening or a correction on top

GSPO, GMPO, CISPO, SAPO and DPPO are losses; their advantages are those of `GroupRelative`. The variant of
REINFORCE++ with a baseline is `GroupRelative(dr_grpo)`, whitened over the batch.

In all of them `kl` subtracts a KL penalty from the reward of each token, and a token is credited with the
penalties from itself to the end of its episode, as with any other reward; baselines of groups leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.baselines import Baseline, grpo
from agentrl.algorithms.corrections import Correction
from agentrl.algorithms.returns import Discount, discounted_returns, gae
from agentrl.algorithms.rewards import KlPenalty, token_rewards
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores, verdicts_of
from agentrl.algorithms.turns import returns_to_go, turn_advantages
from agentrl.algorithms.whitening import whiten
from agentrl.types import Group, Rollout, RolloutId, Verdict


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """Rollouts against their siblings: all trainable tokens of a rollout have its advantage.

    Siblings played the same role in the same group. The baseline counts rollouts: a rollout of several
    samples has the same weight as its siblings, and one that was left out of the samples still counts.
    Sources: in `agentrl.algorithms.baselines`.

    scale: what is done to the baseline's advantages. signal: multiply by all rollouts / those whose siblings'
        rewards differ, as if only the latter had been played: https://arxiv.org/abs/2504.02546 (GPG). batch:
        divide by 1e-6 + the standard deviation (of a sample) of all rewards of the batch:
        https://arxiv.org/abs/2508.08221.
    """

    baseline: Baseline = grpo
    kl: KlPenalty | None = None
    scale: Literal["signal", "batch"] | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, a reward is not finite, or scores are missing.
        """
        outcomes: dict[RolloutId, float] = {}
        rewards: list[list[float]] = []
        for siblings in siblings_of(groups):
            rewards.append([verdict.total for _, verdict in siblings])
            ids = (verdict.rollout_id for _, verdict in siblings)
            outcomes |= zip(ids, self.baseline(rewards[-1]).tolist(), strict=True)
        return _penalised(self._factor(rewards) * tokens.spread(outcomes), self.kl, tokens, scores)

    def _factor(self, rewards: Sequence[Sequence[float]]) -> float:
        everyone = [reward for rewards_G in rewards for reward in rewards_G]
        with_signal = sum(len(rewards_G) for rewards_G in rewards if len(set(rewards_G)) > 1)
        if self.scale is None or not with_signal:
            return 1.0
        if self.scale == "signal":
            return len(everyone) / with_signal
        return 1.0 / (float(np.std(everyone, ddof=1)) + 1e-6)


@dataclass(frozen=True, slots=True)
class LengthWeighted:
    """Rollouts against the mean of their siblings, each of which counts as often as it has tokens.

    advantage = reward - (sum of length x reward) / (sum of lengths), over siblings with trainable tokens.
    It is the baseline of least variance where the squared norm of a rollout's score grows with its length.
    Source: https://arxiv.org/abs/2505.23585 (OPO).
    """

    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, or scores are missing.
        """
        lengths = dict(zip(tokens.rollout_ids, np.diff(tokens.bounds).tolist(), strict=True))
        outcomes: dict[RolloutId, float] = {}
        for siblings in siblings_of(groups):
            rewards = {verdict.rollout_id: verdict.total for _, verdict in siblings}
            shares = [lengths.get(id, 0) for id in rewards]
            is_alike = len(set(rewards.values())) == 1 or not sum(shares)
            baseline = 0.0 if is_alike else float(np.average(list(rewards.values()), weights=shares))
            outcomes |= {id: 0.0 if is_alike else reward - baseline for id, reward in rewards.items()}
        return _penalised(tokens.spread(outcomes), self.kl, tokens, scores)


@dataclass(frozen=True, slots=True)
class RewardDecoupled:
    """Each of several rewards against that of the siblings; then their sum against all rollouts of the batch.

    With r the parts of a verdict, and standard deviations of a sample, over the group in the first line and
    over the batch in the second:

        s = sum over parts k of weight_k x (r_k - mean of r_k) / (std of r_k + 1e-6)
        advantage = (s - mean of s) / (std of s + 1e-6)

    weights: by the name of a part (`Verdict.parts`); a part that is not named does not count, and one that a
    verdict lacks is 0. None: every part counts 1, except those inside another (`env/NAME`). The total of a
    verdict without parts is its only one.
    Source: https://arxiv.org/abs/2601.05242 (GDPO).
    """

    weights: Mapping[str, float] | None = None
    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, a part is not finite, no verdict has a part of the
                names in `weights`, or scores are missing.
        """
        sums: dict[RolloutId, float] = {}
        weights = self._weights(groups)
        for siblings in siblings_of(groups):
            sums_G = np.zeros(len(siblings))
            for name, weight in weights.items():
                sums_G += weight * grpo([_parts(verdict).get(name, 0.0) for _, verdict in siblings])
            sums |= zip((verdict.rollout_id for _, verdict in siblings), sums_G.tolist(), strict=True)
        whitened = grpo(list(sums.values())).tolist()
        return _penalised(tokens.spread(dict(zip(sums, whitened, strict=True))), self.kl, tokens, scores)

    def _weights(self, groups: Sequence[Group]) -> Mapping[str, float]:
        verdicts = [verdict for siblings in siblings_of(groups) for _, verdict in siblings]
        present = sorted({name for verdict in verdicts for name in _parts(verdict)})
        weights = self.weights or {name: 1.0 for name in present if "/" not in name}
        if present and not weights.keys() & set(present):
            raise ValueError(
                f"no verdict has a reward of the names in gdpo_weights ({', '.join(weights)}); name some of "
                f"{', '.join(present)}"
            )
        return weights


def _parts(verdict: Verdict) -> Mapping[str, float]:
    return verdict.parts or {"total": verdict.total}


@dataclass(frozen=True, slots=True)
class TurnRelative:
    """Turns against the same turns of the siblings.

    `turn_advantages` has the formula, and the reason why it is unbiased. gamma discounts from turn to turn.

    Raises:
        ValueError: gamma is not between 0 and 1.
    """

    gamma: float = 1.0
    kl: KlPenalty | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma must be between 0 and 1, got {self.gamma}")

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group or has too few turns, a reward is not finite, or
                scores are missing.
        """
        verdicts_of(groups, tokens.rollout_ids)
        by_id = {
            rollout.verdict.rollout_id: advantages_K
            for siblings in siblings_of(groups)
            for rollout, advantages_K in zip(
                siblings, turn_advantages(returns_to_go(siblings, gamma=self.gamma)), strict=True
            )
        }
        advantages_N = np.zeros(len(tokens))
        for id, start, stop in zip(tokens.rollout_ids, tokens.bounds, tokens.bounds[1:], strict=False):
            turn_n = tokens.turn_N[start:stop]
            if np.any(turn_n >= len(by_id[id])):
                raise ValueError(f"episode {id} has {len(by_id[id])} turns, its samples have more")
            advantages_N[start:stop] = by_id[id][turn_n]
        return _penalised(advantages_N, self.kl, tokens, scores)


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
        penalty_N, metrics = _penalties(self.kl, tokens, scores)
        rewards_N = token_rewards(groups, tokens) - penalty_N
        returns_N = discounted_returns(rewards_N, tokens, gamma=self.gamma, discount=self.discount)
        return Advantages(returns_N, metrics=metrics)


@dataclass(frozen=True, slots=True)
class Gae:
    """Generalised advantages of a critic, and the returns that it learns from: PPO.

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
        penalty_N, metrics = _penalties(self.kl, tokens, scores)
        advantages_N, returns_N = gae(
            token_rewards(groups, tokens) - penalty_N,
            scores.values_N,
            tokens,
            gamma=self.gamma,
            lambd=self.lambd,
            discount=self.discount,
        )
        return Advantages(advantages_N, returns_N, metrics)


@dataclass(frozen=True, slots=True)
class Adjusted:
    """An estimator, and adjustments of its advantages, in this order.

    opd_kl_coef: on-policy distillation, advantage -= opd_kl_coef x (proximal - teacher logprob); the
        expectation of that difference is KL(policy, teacher). Source: https://arxiv.org/abs/2306.13649;
        the reverse KL as a reward: https://arxiv.org/abs/2306.08543.
    normalize_advantages: whiten advantages over the rollout batch; a critic's returns keep their units.
    correction: one of `agentrl.algorithms.corrections`; its factors multiply the advantages, and so only the
        policy's term: entropy, KL and values in the loss do not change, nor do the weights.
    """

    estimator: AdvantageEstimator
    opd_kl_coef: float = 0.0
    normalize_advantages: bool = False
    correction: Correction | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: raised by the estimator; or logprobs of a teacher are missing.
        """
        estimated = self.estimator(groups, tokens, scores)
        advantages_N, metrics, clipped_N = estimated.advantages_N, dict(estimated.metrics), None
        if self.opd_kl_coef:
            gap_N = _teacher_gap(scores)
            advantages_N = advantages_N - self.opd_kl_coef * gap_N
            metrics["opd_kl"] = tokens.mean(gap_N)
        if self.normalize_advantages:
            advantages_N = whiten(advantages_N)
        if self.correction is not None:
            factors_N, correction_metrics, clipped_N = self.correction(tokens, scores)
            advantages_N = advantages_N * factors_N
            metrics |= correction_metrics
        return Advantages(advantages_N, estimated.returns_N, metrics, clipped_N)


def siblings_of(groups: Sequence[Group]) -> list[tuple[Rollout, ...]]:
    """Rollouts that can be compared: those of one group in one role."""
    return [group.siblings(agent) for group in groups for agent in group.trained_agents]


def _penalties(
    kl: KlPenalty | None, tokens: Tokens, scores: TokenScores
) -> tuple[Floats, Mapping[str, float]]:
    """The KL penalty on the reward of each token, [N], and its metric."""
    if kl is None:
        return np.zeros(len(tokens)), {}
    estimate_N = kl.estimate(scores)
    return kl.kl_coef * estimate_N, {"ref_kl": tokens.mean(estimate_N)}


def _penalised(advantages_N: Floats, kl: KlPenalty | None, tokens: Tokens, scores: TokenScores) -> Advantages:
    """Without a critic: subtract the penalties from each token on from its advantage."""
    penalty_N, metrics = _penalties(kl, tokens, scores)
    return Advantages(advantages_N - discounted_returns(penalty_N, tokens), metrics=metrics)


def _teacher_gap(scores: TokenScores) -> Floats:
    if scores.teacher_N is None:
        raise ValueError(
            "on-policy distillation needs the logprobs of a teacher; load one (opd_teacher_load), or set "
            "opd_kl_coef to 0"
        )
    return scores.proximal_N - scores.teacher_N
