"""The history of a run's metrics as diagnoses read it: rows, windows, trends, and the scale of rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, TypeAlias

SOLVED = 0.05
"""How far below the expert's score tasks count as solved: a share of the scale."""
WINDOW = 5
"""Iterations of a mean."""
REWARD_RISES = 0.02
"""A share of the scale: the standard error of a mean over 512 episodes of success or failure."""
MIN_SPREAD = 1e-9
"""A smaller difference is rounding."""

REWARD, SPREAD = "rollout/raw_reward", "rollout/raw_reward_std"
ZERO_STD, GROUPS = "rollout/zero_std/ratio", "rollout/prompts"
TRUNCATED, TRUNCATED_REWARD = "rollout/truncated_ratio", "rollout/truncated_reward"
PROCESSED = "rollout/rewards"
"""Logged where a function has changed the scores: the ones that count."""
NO_ROOM, REPETITION = "rollout/no_room_ratio", "rollout/repetition_ratio"
ENTROPY, STEPS, TEACHER = "train/entropy_loss", "train/optimizer_steps", "train/opd_kl"
HELD_OUT = "eval/sampled"
LOSS, GRAD_NORM, HELD_OUT_LOSS = "train/loss", "train/grad_norm", "eval/loss"
SHARES = {f"train/staleness_{age}/ess": age for age in range(1, 33)}
"""The effective share of the tokens that are so many versions old, by metric."""
KEYS = frozenset(
    {
        *(REWARD, SPREAD, ZERO_STD, GROUPS, TRUNCATED, NO_ROOM, REPETITION, PROCESSED),
        *(TRUNCATED_REWARD, ENTROPY, STEPS, TEACHER, HELD_OUT),
        *(LOSS, GRAD_NORM, HELD_OUT_LOSS),
        *SHARES,
    }
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What conditions take from the configuration.

    expert_score, chance_score: of the environment, see `BaseEnv`. compares: the estimator only compares
    siblings. is_untrained: a fresh model without a warm start. eval_episodes: of each evaluation (count).
    """

    expert_score: float = 1.0
    chance_score: float = 0.0
    compares: bool = True
    is_untrained: bool = False
    eval_episodes: int = 256

    @property
    def scale(self) -> float:
        """The distance from chance to the expert."""
        return max(self.expert_score - self.chance_score, MIN_SPREAD)

    def is_solved(self, reward: float) -> bool:
        """Whether a mean reward is nearly the expert's, so that siblings earn the same for a good reason."""
        return reward >= self.expert_score - SOLVED * self.scale


Row: TypeAlias = dict[str, float]
"""The metrics of one step that conditions read; what was not finite is left out."""


@dataclass(slots=True)
class MetricHistory:
    """The metrics of all steps so far, by step. not_finite: by metric, the steps at which it was not."""

    rows: dict[int, Row] = field(default_factory=dict)
    not_finite: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add metrics of a step; a later value of one replaces the earlier."""
        values = {name: metrics[name] for name in KEYS & metrics.keys()}
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self.rows.setdefault(step, {}).update(finite)
        for name in values.keys() - finite.keys():
            self.not_finite[name].append(step)

    def training(self, *names: str) -> list[Row]:
        """The iterations that have all of these metrics, in order."""
        return [row for row in self.rows.values() if all(name in row for name in (REWARD, *names))]

    def of(self, name: str) -> dict[int, float]:
        """One metric by step, where it was logged and finite."""
        return {step: row[name] for step, row in self.rows.items() if name in row}


class Trend(NamedTuple):
    """A metric where it was lowest, and in the last iterations; and the reward in both.

    Each is a mean over a window. At the beginning there are fewer iterations: the first one alone is a
    window, for a training may break down in the second.
    """

    low: float
    last: float
    reward_at_low: float
    last_reward: float

    @classmethod
    def of(cls, rows: Sequence[Row], name: str) -> Trend | None:
        """The trend over these iterations; None = there is none before the last window."""
        if len(rows) <= WINDOW:
            return None
        values, rewards = [row[name] for row in rows], [row[REWARD] for row in rows]
        earlier = [slice(max(0, end - WINDOW), end) for end in range(1, len(rows) - WINDOW + 1)]
        low, place = min((fmean(values[window]), index) for index, window in enumerate(earlier))
        reward_at_low = fmean(rewards[earlier[place]])
        return cls(low, fmean(values[-WINDOW:]), reward_at_low, fmean(rewards[-WINDOW:]))

    def rises_with_the_reward(self, facts: RunFacts) -> bool:
        """Whether the reward has risen since the metric was lowest."""
        return self.last_reward - self.reward_at_low > REWARD_RISES * facts.scale


def mean_at(history: MetricHistory, name: str, step: int) -> float:
    """The mean of a metric over the steps up to this one; of step 0, its first value, of the same weights."""
    values = history.of(name)
    before = [value for at, value in values.items() if step - WINDOW < at <= step]
    return fmean(before) if before else values[min(values)]


def means_of(values: Sequence[float], size: int) -> list[float]:
    """The means over all windows of so many values, in order."""
    return [fmean(values[end - size : end]) for end in range(size, len(values) + 1)]
