"""The estimators by name: the settings, the loss and the advantages of each.

A new one is a class here, with a place in `EstimatorChoice`, beside the file with its advantages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from agentrl.algorithms.advantages import AdvantageEstimator
from agentrl.algorithms.baselines import dr_grpo, grpo_passk, maxrl, rloo
from agentrl.algorithms.controls import RoleBaselines
from agentrl.algorithms.estimator_config import (
    AlgorithmPart,
    BoundedConfig,
    Bounds,
    ByTurnsConfig,
    CreditParts,
    DiscountedConfig,
    DualClippedConfig,
    EstimatorConfig,
    LaterConfig,
    Objective,
    ScaledConfig,
    Weighting,
)
from agentrl.algorithms.estimators import Gae, ReinforcePlusPlus, RoleConditioned
from agentrl.algorithms.group_relative import (
    BetaNormalized,
    GreedyBaseline,
    GroupRelative,
    LengthWeighted,
    OptimalToken,
    RewardDecoupled,
)
from agentrl.algorithms.states import StateRelative
from agentrl.config import Changes, Needs, NotNegative, Positive, Share


class GrpoConfig(ScaledConfig, DualClippedConfig):
    """Rewards of siblings, less their mean, divided by their standard deviation."""

    name: Literal["grpo"] = "grpo"


class DrGrpoConfig(DualClippedConfig):
    """As grpo, not divided, and each token divided by a constant."""

    name: Literal["dr_grpo"] = "dr_grpo"
    own_weighting: ClassVar[Weighting] = "constant"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean."""
        return GroupRelative(dr_grpo, kl=parts.kl)


class RlooConfig(ByTurnsConfig, DualClippedConfig):
    """Rewards less the mean of the other siblings'."""

    name: Literal["rloo"] = "rloo"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less the mean of the others."""
        return self.by_turns(parts.kl) or GroupRelative(rloo, kl=parts.kl)


class MaxRlConfig(DualClippedConfig):
    """Rewards of siblings, less their mean, divided by it."""

    name: Literal["maxrl"] = "maxrl"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings by their mean."""
        return GroupRelative(maxrl, kl=parts.kl)


class OpoConfig(DualClippedConfig):
    """Rewards less their mean weighted by lengths."""

    name: Literal["opo"] = "opo"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Against the optimal baseline."""
        return LengthWeighted(parts.kl)


class OtbConfig(DualClippedConfig):
    """Rewards less a baseline of each token."""

    name: Literal["otb"] = "otb"
    compares_only: ClassVar[bool] = False
    needs_statistics: ClassVar[bool] = True

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Against the optimal baseline of each token."""
        return OptimalToken(parts.kl)


class GpgConfig(EstimatorConfig):
    """Rewards less their mean, without a ratio."""

    name: Literal["gpg"] = "gpg"
    objective: ClassVar[Objective] = "reinforce"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean, scaled by the groups with a signal."""
        return GroupRelative(dr_grpo, kl=parts.kl, scale="signal")


class GrpoPasskConfig(ScaledConfig, DualClippedConfig):
    """What the best of some siblings earns."""

    name: Literal["grpo_passk"] = "grpo_passk"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The leave-one-out maximum of siblings."""
        baseline = partial(grpo_passk, std_normalization=self.scale_rewards == "group")
        return GroupRelative(baseline, kl=parts.kl, scale="batch" if self.scale_rewards == "batch" else None)


class GdpoConfig(DualClippedConfig):
    """Several rewards, each of which is normalised by itself."""

    name: Literal["gdpo"] = "gdpo"
    prefix: ClassVar[str] = "gdpo"
    compares_only: ClassVar[bool] = False

    weights: Annotated[dict[str, float], AlgorithmPart.CREDIT] = Field(default_factory=dict)
    """Weight of each reward by its name, such as {env = 1.0, brevity = 0.2}; left out, each reward counts 1
    (a table; as a flag: JSON)."""

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Rewards by their names."""
        return RewardDecoupled(self.weights or None, parts.kl)


class BnpoConfig(DualClippedConfig):
    """Rewards of 0 and 1, normalised by a beta distribution."""

    name: Literal["bnpo"] = "bnpo"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Rewards by the distribution of their means."""
        return BetaNormalized(parts.kl)


class GigpoConfig(LaterConfig, ScaledConfig, DualClippedConfig):
    """Turns that began in one state, compared beside whole episodes."""

    name: Literal["gigpo"] = "gigpo"
    prefix: ClassVar[str] = "gigpo"
    compares_only: ClassVar[bool] = False

    step_advantage_weight: Annotated[Positive, AlgorithmPart.CREDIT] = 1.0
    """Weight of the advantage of a turn among those from the same state, beside the episode's."""

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Episodes against siblings, and turns against those from the same state."""
        return StateRelative(self.gamma, self.step_advantage_weight, self.scale_rewards == "group", parts.kl)

    @model_validator(mode="after")
    def _compares_no_batch(self) -> Self:
        if self.scale_rewards == "batch":
            raise ValueError(
                "gigpo divides by the standard deviation of a group, and of the turns of a state, or not at "
                "all; choose scale_rewards = group or none."
            )
        return self


class GspoConfig(ScaledConfig, ByTurnsConfig, DualClippedConfig):
    """As grpo, with the ratio of a sequence in place of a token's."""

    name: Literal["gspo"] = "gspo"
    objective: ClassVar[Objective] = "gspo"
    own_bounds: ClassVar[Bounds] = (3e-4, 4e-4)
    own_weighting: ClassVar[Weighting] = "sample"

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean, by episodes or by turns."""
        return self.by_turns(parts.kl) or super().estimator(parts)


class GmpoConfig(ScaledConfig, BoundedConfig):
    """As grpo, with the geometric mean of a sequence's ratios."""

    name: Literal["gmpo"] = "gmpo"
    objective: ClassVar[Objective] = "gmpo"
    own_bounds: ClassVar[Bounds] = (0.4, 0.4)
    own_weighting: ClassVar[Weighting] = "sample"


class CispoConfig(ScaledConfig, ByTurnsConfig, BoundedConfig):
    """As grpo, with a bounded ratio that has no gradient."""

    name: Literal["cispo"] = "cispo"
    objective: ClassVar[Objective] = "cispo"
    own_bounds: ClassVar[Bounds] = (1.0, 4.0)

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean, by episodes or by turns."""
        return self.by_turns(parts.kl) or super().estimator(parts)


class SapoConfig(ScaledConfig):
    """As grpo; the gradient of a token fades as its ratio leaves 1: the larger tau, the sooner."""

    name: Literal["sapo"] = "sapo"
    prefix: ClassVar[str] = "sapo"
    objective: ClassVar[Objective] = "sapo"
    own_weighting: ClassVar[Weighting] = "sample"

    tau_positive: Annotated[Positive, AlgorithmPart.LOSS] = 1.0
    """Temperature where the advantage is positive."""
    tau_negative: Annotated[Positive, AlgorithmPart.LOSS] = 1.05
    """Temperature elsewhere."""


class VespoConfig(ScaledConfig):
    """As grpo; the factor of a sequence by its ratio w to the engine: w^k exp(lambda (1 - w))."""

    name: Literal["vespo"] = "vespo"
    prefix: ClassVar[str] = "vespo"
    objective: ClassVar[Objective] = "vespo"
    takes_ratio_to_engine: ClassVar[bool] = True

    k_positive: Annotated[Positive, AlgorithmPart.LOSS] = 2.0
    """k where the advantage is not negative."""
    lambda_positive: Annotated[Positive, AlgorithmPart.LOSS] = 3.0
    """lambda where the advantage is not negative."""
    k_negative: Annotated[Positive, AlgorithmPart.LOSS] = 3.0
    """k elsewhere."""
    lambda_negative: Annotated[Positive, AlgorithmPart.LOSS] = 2.0
    """lambda elsewhere."""


class DppoConfig(ScaledConfig, DualClippedConfig):
    """As grpo, with a trust region of a token around the engine's probability."""

    name: Literal["dppo"] = "dppo"
    prefix: ClassVar[str] = "dppo"
    objective: ClassVar[Objective] = "dppo_tv"
    takes_ratio_to_engine: ClassVar[bool] = True

    divergence: Annotated[Literal["tv", "kl"], AlgorithmPart.LOSS] = "tv"
    """What eps_clip and eps_clip_high bound: the total variation or the KL of two outcomes, the token and any
    other."""

    @property
    def loss_objective(self) -> Objective:
        """That of the divergence."""
        return "dppo_kl" if self.divergence == "kl" else "dppo_tv"

    @property
    def bounds(self) -> Bounds:
        """Those that were set, or those of the divergence."""
        own = 0.05 if self.divergence == "kl" else 0.15
        return self.eps_clip or own, self.eps_clip_high or own


class RemaxConfig(DualClippedConfig):
    """Rewards less that of a sibling that takes the likeliest token throughout."""

    name: Literal["remax"] = "remax"
    compares: ClassVar[bool] = False
    plays_greedy: ClassVar[bool] = True

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Against the greedy sibling."""
        return GreedyBaseline(parts.kl)


class RaeConfig(DualClippedConfig):
    """Rewards less the mean reward of the role so far."""

    name: Literal["rae"] = "rae"
    prefix: ClassVar[str] = "rae"
    compares: ClassVar[bool] = False

    decay: Annotated[float, Field(ge=0.0, lt=1.0), AlgorithmPart.CREDIT] = 0.95
    """Share of the baseline that is left after another rollout."""

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Against the baseline of the role."""
        return RoleConditioned(parts.baselines or RoleBaselines(self.decay), kl=parts.kl)


class ReinforcePlusPlusConfig(DiscountedConfig):
    """Discounted returns of each token, whitened."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    is_whitened: ClassVar[bool] = True

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Returns of each token."""
        return ReinforcePlusPlus(self.gamma, self.discount_per, parts.kl)


class ReinforcePlusPlusBaselineConfig(DualClippedConfig):
    """Rewards of siblings, less their mean, whitened."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    is_whitened: ClassVar[bool] = True
    whitens: ClassVar[bool] = True

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """The rewards of siblings, less their mean."""
        return GroupRelative(dr_grpo, kl=parts.kl)


class PpoConfig(DiscountedConfig):
    """Returns against a critic's values."""

    name: Literal["ppo"] = "ppo"

    lambd: Annotated[Share, AlgorithmPart.CREDIT] = 1.0
    """GAE: 1 uses returns only, 0 the critic's next value."""
    value_clip: NotNegative = 0.2
    """How far the critic's values may move in a step before their gradient is cut off (reward; 0 = no
    bound)."""
    bootstrap_truncated: Annotated[bool, AlgorithmPart.CREDIT] = False
    """Credit the last token of an episode that was cut off with what the critic expects to follow."""
    critic_lr: Annotated[Positive | None, Changes.LEARNING] = None
    """Peak learning rate of the critic; left out, lr."""
    critic_lr_warmup_iters: Annotated[Annotated[int, Field(ge=0)] | None, Changes.LEARNING] = None
    """Optimizer steps over which it rises to that (count); left out, lr_warmup_iters."""
    critic_weight_decay: Annotated[NotNegative | None, Changes.LEARNING] = None
    """Decoupled weight decay of the critic; left out, weight_decay."""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps that the critic learns before the policy does (count)."""
    critic_data: str | None = None
    """Folder of a run, on whose episodes the critic is trained before RL."""
    critic_data_epochs: Annotated[int, Field(ge=1), Needs("critic_data")] = 1
    """Passes over these (critic_data; count)."""

    def estimator(self, parts: CreditParts) -> AdvantageEstimator:
        """Generalised advantages of the critic."""
        return Gae(self.gamma, self.lambd, self.discount_per, parts.kl)


EstimatorChoice = Annotated[
    GrpoConfig
    | DrGrpoConfig
    | RlooConfig
    | MaxRlConfig
    | OpoConfig
    | OtbConfig
    | GpgConfig
    | GrpoPasskConfig
    | GdpoConfig
    | BnpoConfig
    | GigpoConfig
    | GspoConfig
    | GmpoConfig
    | CispoConfig
    | SapoConfig
    | VespoConfig
    | DppoConfig
    | RemaxConfig
    | RaeConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | PpoConfig,
    Field(discriminator="name"),
]
ESTIMATORS: Mapping[str, type[EstimatorConfig]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(EstimatorChoice)[0])
}
"""All estimators, by name."""
