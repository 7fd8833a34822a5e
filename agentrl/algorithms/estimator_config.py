"""What the estimators have in common: the keys that several have, and what a run asks of each."""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum
from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from agentrl.algorithms.advantages import AdvantageEstimator
from agentrl.algorithms.baselines import grpo
from agentrl.algorithms.controls import RoleBaselines
from agentrl.algorithms.group_relative import GroupRelative, TurnRelative
from agentrl.algorithms.rewards import KlPenalty
from agentrl.config import Positive, Share, Variant

Weighting = Literal["token", "sample", "rollout", "prompt", "constant"]
Objective = Literal["clip", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "reinforce"]
Bounds = tuple[float, float]
_NEAR = (0.2, 0.28)


class AlgorithmPart(Enum):
    """Beside a key: which part of the algorithm it belongs to, which a function of the user's may replace."""

    CREDIT = "from rewards to advantages"
    LOSS = "from advantages to a loss"


class CreditParts(NamedTuple):
    """What an estimator of a run is made with. kl: the penalty in the reward. baselines: of roles."""

    kl: KlPenalty | None = None
    baselines: RoleBaselines | None = None


class EstimatorConfig(Variant):
    """A named estimator: how rewards become advantages, and the loss that goes with them by default."""

    objective: ClassVar[Objective] = "clip"
    """What the loss does with the probability ratio."""
    compares: ClassVar[bool] = True
    """Whether it needs siblings."""
    compares_only: ClassVar[bool] = True
    """Whether the advantages of a group are 0 where the rewards of its episodes are equal."""
    plays_greedy: ClassVar[bool] = False
    """Whether it compares with one more sibling, which takes the likeliest token throughout."""
    takes_ratio_to_engine: ClassVar[bool] = False
    """Whether its ratio is that of the current policy to the engine: it corrects for older weights."""
    needs_statistics: ClassVar[bool] = False
    """Whether the trainer computes statistics of its distributions, see `Trainer.score`."""
    is_whitened: ClassVar[bool] = False
    """Whether it is made of whitened advantages."""
    own_weighting: ClassVar[Weighting] = "token"
    """What has equal weight by default."""
    whitens: ClassVar[bool] = False
    """Whether advantages are whitened by default."""

    loss_weighting: Weighting | None = None
    """What has equal weight: every token, sample, rollout or prompt, or every token divided by a constant;
    left out, token; gspo, gmpo and sapo sample, dr_grpo constant."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the batch; left out, ppo does, and reinforce_plus_plus and its baseline form
    always do."""
    credit_level: Annotated[Literal["episode", "turn"], AlgorithmPart.CREDIT] = "episode"
    """Compare the rewards of episodes, or turn by turn the rewards from that turn on (rloo, gspo, cispo)."""

    @abstractmethod
    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """From groups to advantages."""

    @property
    def weighting(self) -> Weighting:
        """What has equal weight, as set or by default."""
        return self.loss_weighting or self.own_weighting

    @property
    def normalizes(self) -> bool:
        """Whether advantages are whitened, as set or by default."""
        return self.whitens if self.normalize_advantages is None else self.normalize_advantages

    @property
    def loss_objective(self) -> Objective:
        """`objective`, where a key decides it."""
        return self.objective

    @property
    def bounds(self) -> Bounds:
        """How far the ratio may fall and rise before its gradient is cut off: as set, or its own."""
        return _NEAR

    @property
    def set_bounds(self) -> tuple[float | None, float | None]:
        """The two that were set."""
        return None, None

    @property
    def dual_clip(self) -> float | None:
        """Most that a negative advantage is multiplied by; None = any."""
        return None

    @model_validator(mode="after")
    def _suits_itself(self) -> Self:
        if self.credit_level == "turn" and not isinstance(self, ByTurnsConfig):
            raise ValueError(
                f"credit_level = turn compares a turn with those of the other siblings, which `{self.name}` "
                "does not; choose rloo, gspo or cispo."
            )
        if self.is_whitened and not self.normalizes:
            raise ValueError(
                f"`{self.name}` is made of whitened advantages; leave normalize_advantages out, or choose "
                "another advantage_estimator."
            )
        return self


class BoundedConfig(EstimatorConfig):
    """One whose loss has bounds of the probability ratio."""

    own_bounds: ClassVar[Bounds] = _NEAR

    eps_clip: Annotated[Annotated[float, Field(gt=0.0, le=1.0)] | None, AlgorithmPart.LOSS] = None
    """How far below 1 the probability ratio may fall before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.2, none with kl_cov; gspo 0.0003, gmpo 0.4, cispo 1: no bound,
    dppo 0.15, with kl 0.05."""
    eps_clip_high: Annotated[Positive | None, AlgorithmPart.LOSS] = None
    """How far above 1 the probability ratio may rise before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.28, none with kl_cov; gspo 0.0004, gmpo 0.4, cispo 4, dppo as
    eps_clip."""

    @property
    def bounds(self) -> Bounds:
        """Those that were set, or its own."""
        low, high = self.own_bounds
        return self.eps_clip or low, self.eps_clip_high or high

    @property
    def set_bounds(self) -> tuple[float | None, float | None]:
        """The two that were set."""
        return self.eps_clip, self.eps_clip_high


class DualClippedConfig(BoundedConfig):
    """One whose loss has a bound for negative advantages, too."""

    eps_clip_c: Annotated[Annotated[float, Field(gt=1.0)] | None, AlgorithmPart.LOSS] = None
    """Dual clip: a negative advantage is multiplied by at most this (ratio; dppo: any advantage); left out,
    none; dppo 20."""

    @property
    def dual_clip(self) -> float | None:
        """Most that a negative advantage is multiplied by; None = any."""
        return self.eps_clip_c


class ScaledConfig(EstimatorConfig):
    """One whose advantages may be divided by a standard deviation."""

    scale_rewards: Annotated[Literal["group", "batch", "none"], AlgorithmPart.CREDIT] = "group"
    """Whose standard deviation of rewards advantages are divided by: that of the group, of the whole batch,
    or none; gigpo: group or none."""

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean."""
        baseline = partial(grpo, std_normalization=self.scale_rewards == "group")
        return GroupRelative(baseline, kl=parts.kl, scale="batch" if self.scale_rewards == "batch" else None)


class LaterConfig(EstimatorConfig):
    """One to which it matters when a reward is earned."""

    gamma: Annotated[Share, AlgorithmPart.CREDIT] = 1.0
    """Discount of later rewards: of tokens, or of turns (rloo, gspo and cispo: with credit_level = turn)."""


class ByTurnsConfig(LaterConfig):
    """One that may compare turns in place of episodes."""

    def by_turns(self, kl: KlPenalty | None) -> AdvantageEstimator | None:
        """Turns against those of the other siblings; None = episodes are compared."""
        return TurnRelative(gamma=self.gamma, kl=kl) if self.credit_level == "turn" else None

    @property
    def without_effect(self) -> dict[str, str]:
        """What is of turns alone, or of episodes alone."""
        if self.credit_level == "turn":
            return {"scale_rewards": "with credit_level = turn; drop that"}
        return {"gamma": "without credit_level = turn; choose it"}


class DiscountedConfig(LaterConfig, DualClippedConfig):
    """One with returns of each token."""

    compares: ClassVar[bool] = False
    whitens: ClassVar[bool] = True

    discount_per: Annotated[Literal["token", "turn"], AlgorithmPart.CREDIT] = "token"
    """What gamma and lambd count."""
