"""What an algorithm adapts from one iteration to the next: coefficients, and the baselines of roles.

A checkpoint holds the numbers (`Controls.state`), so a run that resumes goes on with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.types import Coefficients, Group

_MAX_ERROR = 0.2


@dataclass(slots=True)
class AdaptiveKl:
    """The coefficient of a penalty, so that the divergence from the reference stays near a target.

    After an iteration with n rollouts that are trained on, whose mean divergence is kl (nats per token):

        coef x= 1 + clip(kl / target - 1, -0.2, 0.2) x n / horizon

    Source: https://arxiv.org/abs/1909.08593.

    Raises:
        ValueError: target or horizon is not above 0, or coef is not.
    """

    coef: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not (self.coef > 0.0 and self.target > 0.0 and self.horizon > 0.0):
            raise ValueError("an adaptive penalty needs a coefficient, a target and a horizon above 0")

    def observe(self, kl: float, num_rollouts: int) -> None:
        """Adapt the coefficient."""
        error = min(max(kl / self.target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coef *= max(1.0 + error * num_rollouts / self.horizon, 0.0)


@dataclass(slots=True)
class AdaptiveEntropy:
    """The coefficient of the entropy bonus, so that the policy's entropy does not fall below a target (nats).

    After an iteration coef grows by step where the entropy was below the target, and shrinks by it elsewhere,
    down to 0. Where the entropy was above the target, there is no bonus in the next iteration.

    Source: https://arxiv.org/abs/2505.22312 (adaptive entropy control of Skywork-OR1).

    Raises:
        ValueError: target or step is not above 0, or coef is negative.
    """

    coef: float
    target: float
    step: float = 1e-3
    is_low: bool = True

    def __post_init__(self) -> None:
        if not (self.coef >= 0.0 and self.target > 0.0 and self.step > 0.0):
            raise ValueError(
                "an adaptive bonus needs a target and a step above 0, and 0 or more to begin with"
            )

    @property
    def active(self) -> float:
        """The coefficient that is applied."""
        return self.coef if self.is_low else 0.0

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient."""
        self.is_low = entropy < self.target
        self.coef = max(self.coef + (self.step if self.is_low else -self.step), 0.0)


@dataclass(slots=True)
class RoleBaselines:
    """The mean reward of each role, over the rollouts so far; later ones count for more.

    A batch with n rollouts of a role, whose mean reward is m: baseline = decay^n x baseline + (1 - decay^n)
    x m. One by one, as in the paper, the result would depend on their order.

    decay: how much of it is left after another rollout. means: by role; 0 for one that never played.
    Source: https://arxiv.org/abs/2506.24119 (SPIRAL).

    Raises:
        ValueError: decay is not between 0 and 1.
    """

    decay: float = 0.95
    means: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay}")

    def observe(self, groups: Sequence[Group]) -> None:
        """Adapt the baselines."""
        rewards: dict[str, list[float]] = {}
        for verdict in (verdict for group in groups for verdict in group.trained_verdicts):
            rewards.setdefault(verdict.agent, []).append(verdict.total)
        for agent, own in rewards.items():
            kept = self.decay ** len(own)
            mean = math.fsum(own) / len(own)
            self.means[agent] = kept * self.means.get(agent, 0.0) + (1.0 - kept) * mean


@dataclass(slots=True)
class Controls:
    """All that a run adapts; None = it does not.

    kl_metric: the metric (train/...) that `kl` goes by.
    """

    kl: AdaptiveKl | None = None
    entropy: AdaptiveEntropy | None = None
    baselines: RoleBaselines | None = None
    kl_metric: str = "kl_loss"

    @property
    def coefficients(self) -> Coefficients:
        """Those of the next optimizer steps."""
        return Coefficients(
            entropy=None if self.entropy is None else self.entropy.active,
            kl=None if self.kl is None else self.kl.coef,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers that apply to the next iteration."""
        entropy, kl = self.coefficients
        means = {} if self.baselines is None else self.baselines.means
        named = {"entropy_coef": entropy, "kl_coef": kl}
        return {
            **{name: value for name, value in named.items() if value is not None},
            **{f"baseline/{agent}": mean for agent, mean in means.items()},
        }

    def observe(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Adapt to an iteration with these groups and metrics (train/...); one without updates has none."""
        entropy, kl = metrics.get("train/entropy_loss"), metrics.get(f"train/{self.kl_metric}")
        if self.entropy is not None and entropy is not None:
            self.entropy.observe(entropy)
        if self.kl is not None and kl is not None:
            self.kl.observe(kl, sum(len(group.trained_verdicts) for group in groups))
        if self.baselines is not None:
            self.baselines.observe(groups)

    def state(self) -> dict[str, float]:
        """The numbers, for a checkpoint."""
        numbers: dict[str, float] = {}
        if self.kl is not None:
            numbers["kl"] = self.kl.coef
        if self.entropy is not None:
            numbers |= {"entropy": self.entropy.coef, "entropy_is_low": float(self.entropy.is_low)}
        means = {} if self.baselines is None else self.baselines.means
        return numbers | {f"baseline/{agent}": mean for agent, mean in means.items()}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on with the numbers of a checkpoint; what it lacks stays as it is."""
        if self.kl is not None:
            self.kl.coef = numbers.get("kl", self.kl.coef)
        if self.entropy is not None:
            self.entropy.coef = numbers.get("entropy", self.entropy.coef)
            self.entropy.is_low = bool(numbers.get("entropy_is_low", self.entropy.is_low))
        if self.baselines is not None:
            names = ((name, name.removeprefix("baseline/")) for name in numbers)
            self.baselines.means |= {agent: numbers[name] for name, agent in names if agent != name}
