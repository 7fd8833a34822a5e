"""Estimators that compare rollouts with their siblings; each an `AdvantageEstimator`.

    GroupRelative             GRPO, Dr. GRPO, RLOO, MaxRL, GPG, pass@k: one advantage for a whole episode
    RewardDecoupled           GDPO: each of several rewards against its own siblings
    BetaNormalized            BNPO: by how likely the group's mean is among the groups of the batch
    GreedyBaseline            ReMax: against the sibling that was played greedily
    LengthWeighted            OPO: the same, with a mean in which long episodes count for more
    OptimalToken              OTB: with a mean for each token, in which uncertain episodes count for more
    TurnRelative              the same, turn by turn

GiGPO, which also compares the turns that began in one state, is in `agentrl.algorithms.states`.
GSPO, GMPO, CISPO, SAPO, VESPO and DPPO are losses; their advantages are those of `GroupRelative`. The variant
of REINFORCE++ with a baseline is `GroupRelative(dr_grpo)`, whitened over the batch.

In all of them `kl` subtracts a KL penalty from the reward of each token, and a token is credited with the
penalties from itself to the end of its episode, as with any other reward; baselines of groups leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

import numpy as np

from agentrl.algorithms.advantages import Advantages
from agentrl.algorithms.baselines import Baseline, dr_grpo, grpo
from agentrl.algorithms.returns import discounted_returns
from agentrl.algorithms.rewards import KlPenalty, penalised, token_rewards
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.algorithms.turns import returns_to_go, turn_advantages
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
        return penalised(self._factor(rewards) * tokens.spread(outcomes), self.kl, tokens, scores)

    def _factor(self, rewards: Sequence[Sequence[float]]) -> float:
        everyone = [reward for rewards_G in rewards for reward in rewards_G]
        with_signal = sum(len(rewards_G) for rewards_G in rewards if len(set(rewards_G)) > 1)
        if self.scale is None or not with_signal:
            return 1.0
        if self.scale == "signal":
            return len(everyone) / with_signal
        return 1.0 / (float(np.std(everyone, ddof=1)) + 1e-6)


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """Rollouts against the sibling that the policy played greedily.

    advantage = reward - reward of the greedy sibling, in the same role (the mean of several). It depends on
    no sampled token, so the gradient is unbiased, and a group may have a single sampled rollout.
    Source: https://arxiv.org/abs/2310.10505 (ReMax).
    """

    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a group has no greedy sibling, a sample's episode is in no group, or scores are
                missing.
        """
        outcomes: dict[RolloutId, float] = {}
        for group in groups:
            greedy = {episode.id for episode in group.greedy}
            if not greedy:
                raise ValueError(
                    f"remax compares with a sibling that was played greedily, and group {group.id} has "
                    "none; play with advantage_estimator = remax, or choose another one"
                )
            for agent in group.trained_agents:
                totals = {verdict.rollout_id: verdict.total for _, verdict in group.siblings(agent)}
                baseline = [total for id, total in totals.items() if id.episode in greedy]
                # A sub-agent that nobody called in the greedy episode is compared with nothing.
                outcomes |= {id: total - fmean(baseline or [total]) for id, total in totals.items()}
        return penalised(tokens.spread(outcomes), self.kl, tokens, scores)


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
        return penalised(tokens.spread(outcomes), self.kl, tokens, scores)


@dataclass(frozen=True, slots=True)
class BetaNormalized:
    """Rollouts against the mean of their siblings, in units of the density of that mean.

    With p the mean reward of a group, and m and v the mean and the variance (of a sample) of p over the
    groups of the batch:

        s = m (1 - m) / v - 1        alpha = max(1 + s m / 3, 1)        beta = max(1 + s (1 - m) / 3, 1)
        advantage = (reward - p) / max(density of Beta(alpha, beta) at p, 1e-6)

    So groups with an unusual mean count for more. Where fewer than two groups have siblings, or all means are
    equal, the density is 1.
    Source: https://arxiv.org/abs/2506.02864 (BNPO), whose rewards are 0 and 1; numbers between serve as well.
    The bounds 1 and 1e-6 are those of its authors' code.
    """

    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, a reward is not between 0 and 1, or scores are
                missing.
        """
        rewards = [
            {verdict.rollout_id: verdict.total for _, verdict in siblings} for siblings in siblings_of(groups)
        ]
        if wrong := [r for group in rewards for r in group.values() if not 0.0 <= r <= 1.0]:
            raise ValueError(
                f"bnpo needs rewards between 0 and 1, got {wrong[0]:g}; shape them (algorithm.shaping), or "
                "choose another estimator"
            )
        means = np.array([np.mean(list(group.values())) for group in rewards if len(group) > 1])
        alpha, beta = _beta_of(means)
        outcomes: dict[RolloutId, float] = {}
        for group in rewards:
            advantages_G = dr_grpo(list(group.values())) / _beta_density(
                float(np.mean(list(group.values()))), alpha, beta
            )
            outcomes |= zip(group, advantages_G.tolist(), strict=True)
        return penalised(tokens.spread(outcomes), self.kl, tokens, scores)


_MAX_SIZE = 1e8
"""Of a Beta distribution, alpha + beta: above it, rounding of its logarithms shows in the density."""


def _beta_of(means: Floats) -> tuple[float, float]:
    """The parameters by which BNPO normalises, from the mean rewards of groups."""
    if len(means) < 2 or np.all(means == means[0]):
        return 1.0, 1.0
    mean = float(means.mean())
    size = min(mean * (1.0 - mean) / float(means.var(ddof=1)) - 1.0, _MAX_SIZE)
    return max(1.0 + size * mean / 3.0, 1.0), max(1.0 + size * (1.0 - mean) / 3.0, 1.0)


def _beta_density(p: float, alpha: float, beta: float) -> float:
    """The density of Beta(alpha, beta) at p, both at least 1; at least 1e-6."""
    log_norm = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    # Only the sum of the logarithms is bounded: means that are nearly equal make alpha and beta huge.
    return max(math.exp(log_norm + _times_log(alpha - 1.0, p) + _times_log(beta - 1.0, 1.0 - p)), 1e-6)


def _times_log(x: float, y: float) -> float:
    """x log y for x >= 0 and y in [0, 1]; 0 where x is 0."""
    if x == 0.0:
        return 0.0
    return x * math.log(y) if y > 0.0 else -math.inf


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
        return penalised(tokens.spread(dict(zip(sums, whitened, strict=True))), self.kl, tokens, scores)

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
        by_id = {
            rollout.verdict.rollout_id: advantages_K
            for siblings in siblings_of(groups)
            for rollout, advantages_K in zip(
                siblings, turn_advantages(returns_to_go(siblings, gamma=self.gamma)), strict=True
            )
        }
        return penalised(tokens.spread_turns(by_id), self.kl, tokens, scores)


@dataclass(frozen=True, slots=True)
class OptimalToken:
    """Rollouts against a baseline of each token, in which those count for more that were more uncertain.

    With G the rewards from a token on, and w = 1 - 2 pi + sum of pi^2 the squared norm of its score with
    respect to the logits, the baseline of the t-th token is, over the siblings that have so many tokens,

        b_t = sum of W_t G_t / sum of W_t        W_t = w_1 + ... + w_t

    Where a single sibling is that long, b_t is 0: its own G_t would take all gradient from the tokens after
    the second-longest. Where no W_t is above 0, b_t is the G_t of the longest, since no gradient has reached
    the tokens.
    Source: https://arxiv.org/abs/2602.07078 (optimal token baseline), without its factor for older weights;
    the baseline after the second-longest is that of its authors' code, by default.
    """

    kl: KlPenalty | None = None

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`, whose rollouts are all in `groups`.

        Raises:
            ValueError: a sample's episode is in no group, a reward is not finite, or scores are missing.
        """
        if scores.sum_pi_squared_N is None:
            raise ValueError("otb needs the sums of squared probabilities; let the trainer score the batch")
        returns_N = discounted_returns(token_rewards(groups, tokens), tokens)
        pi_N = np.exp(np.minimum(scores.proximal_N, 0.0))
        energy_N = np.maximum(1.0 - 2.0 * pi_N + scores.sum_pi_squared_N, 0.0)
        spans = dict(zip(tokens.rollout_ids, pairwise(tokens.bounds.tolist()), strict=True))
        advantages_N = np.zeros(len(tokens))
        for siblings in siblings_of(groups):
            own = [slice(*spans[v.rollout_id]) for _, v in siblings if v.rollout_id in spans]
            own.sort(key=_length, reverse=True)
            # Relative to those of the longest, so that equal returns cancel exactly.
            longest_T = returns_N[own[0]] if own else np.zeros(0)
            returns_GT = _padded([returns_N[span] - longest_T[: _length(span)] for span in own])
            weights_GT = _padded([np.cumsum(energy_N[span]) for span in own])
            baseline_T = (weights_GT * returns_GT).sum(0) / np.maximum(weights_GT.sum(0), 1e-30)
            alone = slice(_length(own[1]) if len(own) > 1 else 0, None)
            baseline_T[alone] = -longest_T[alone]
            for span, returns_T in zip(own, returns_GT, strict=True):
                advantages_N[span] = (returns_T - baseline_T)[: _length(span)]
        return penalised(advantages_N, self.kl, tokens, scores)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _padded(rows: Sequence[Floats]) -> Floats:
    """Rows of different lengths as one array, 0 after their ends."""
    padded = np.zeros((len(rows), max((len(row) for row in rows), default=0)))
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def siblings_of(groups: Sequence[Group]) -> list[tuple[Rollout, ...]]:
    """Rollouts that can be compared: those of one group in one role."""
    return [group.siblings(agent) for group in groups for agent in group.trained_agents]
