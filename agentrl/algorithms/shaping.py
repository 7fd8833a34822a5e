"""Shaped rewards: what an estimator compares in place of scores. Those in the journal do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.tokens import Tokens, TokenScores
from agentrl.config import Needs, NotNegative, Section
from agentrl.types import Group, Rollout, RolloutId, Verdict


@dataclass(frozen=True, slots=True)
class Shaping:
    """From the score of a rollout to the reward that is compared:

        scale x min(max(score, low), high) - turn_penalty x turns - overlong_penalty x excess
        excess = min(max((tokens - overlong_len) / overlong_buffer_len, 0), 1)

    turns: those of the rollout's agent. tokens: the ones that the policy sampled for it, in all its samples.
    overlong_len: tokens without a penalty; None: any number. overlong_buffer_len: tokens over which the
    penalty grows to its full size.

    Source of the penalty for length: https://arxiv.org/abs/2503.14476, equation 13 (soft overlong
    punishment): there overlong_len + overlong_buffer_len is the most that may be generated, and
    overlong_penalty is 1.

    Raises:
        ValueError: low is not below high, or overlong_buffer_len is below 1.
    """

    scale: float = 1.0
    low: float = -np.inf
    high: float = np.inf
    turn_penalty: float = 0.0
    overlong_len: int | None = None
    overlong_buffer_len: int = 1
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"rewards are kept between bounds low < high, got {self.low} and {self.high}")
        if self.overlong_buffer_len < 1:
            raise ValueError(f"overlong_buffer_len must be at least 1 token, got {self.overlong_buffer_len}")

    def reward(self, score: float, *, turns: int, tokens: int) -> float:
        """The shaped reward of a rollout."""
        excess = 0.0
        if self.overlong_len is not None:
            excess = min(max((tokens - self.overlong_len) / self.overlong_buffer_len, 0.0), 1.0)
        kept = self.scale * min(max(score, self.low), self.high)
        return kept - self.turn_penalty * turns - self.overlong_penalty * excess

    def verdict(self, rollout: Rollout) -> Verdict:
        """The rollout's verdict with its shaped reward. Rewards of turns are part of it and stay."""
        episode, verdict = rollout
        turns = episode.turns_of(verdict.agent)
        tokens = sum(len(turn.tokens.completion.token_ids) for turn in turns if turn.tokens is not None)
        return replace(verdict, total=self.reward(verdict.total, turns=len(turns), tokens=tokens))


@dataclass(frozen=True, slots=True)
class Shaped:
    """An estimator that gets shaped rewards.

    Metrics: those of the estimator, and reward_shaping (mean over trained rollouts of shaped reward - score).
    """

    estimator: AdvantageEstimator
    shaping: Shaping

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`.

        Raises:
            ValueError: raised by the estimator.
        """
        changes: list[float] = []
        shaped = [self._shaped(group, changes) for group in groups]
        estimated = self.estimator(shaped, tokens, scores)
        change = float(np.mean(changes)) if changes else 0.0
        return replace(estimated, metrics={**estimated.metrics, "reward_shaping": change})

    def _shaped(self, group: Group, changes: list[float]) -> Group:
        by_id: Mapping[RolloutId, Verdict] = {
            rollout.verdict.rollout_id: self.shaping.verdict(rollout)
            for agent in group.trained_agents
            for rollout in group.siblings(agent)
        }
        changes += [by_id[v.rollout_id].total - v.total for v in group.verdicts if v.rollout_id in by_id]
        return replace(group, verdicts=tuple(by_id.get(v.rollout_id, v) for v in group.verdicts))


class ShapingConfig(Section):
    """What an estimator compares in place of scores; those that are journalled and logged do not change."""

    prefix: ClassVar[str] = "shaping"

    scale: float = 1.0
    """Factor of the score (reward)."""
    low: float | None = None
    """Least score that is compared (reward); left out, any."""
    high: float | None = None
    """Largest score that is compared (reward); left out, any."""
    turn_penalty: NotNegative = 0.0
    """Penalty for each turn (reward)."""
    overlong_len: Annotated[int, Field(ge=0)] | None = None
    """Sampled tokens of an episode without a penalty (tokens); left out, any number."""
    overlong_buffer_len: Annotated[int, Field(ge=1), Needs("overlong_len")] = 256
    """Further tokens over which the penalty grows to its full size (shaping_overlong_len; tokens)."""
    overlong_penalty: Annotated[NotNegative, Needs("overlong_len")] = 1.0
    """Its full size (shaping_overlong_len; reward)."""

    @property
    def is_set(self) -> bool:
        """Whether anything changes a score."""
        return self != ShapingConfig()

    @model_validator(mode="after")
    def _bounds(self) -> ShapingConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"shaping_low ({self.low:g}) must be below shaping_high ({self.high:g}); change one."
            )
        return self
