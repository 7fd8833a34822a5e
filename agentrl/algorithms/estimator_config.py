"""Settings of single estimators, of shaped rewards and of entropy control: tables of `[algorithm]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.algorithms.correction_config import NotNegative, Positive
from agentrl.algorithms.hierarchy import role_of
from agentrl.config import Section

Finite = Annotated[float, Field(allow_inf_nan=False)]
ShareAboveZero = Annotated[float, Field(gt=0.0, le=1.0)]


class SapoConfig(Section):
    """How soon the gradient of a token fades as its ratio leaves 1: the larger, the sooner."""

    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive (sapo)."""
    tau_negative: Positive = 1.05
    """Temperature elsewhere (sapo)."""


class VespoConfig(Section):
    """The factor of a sequence by its ratio w to the engine: w^k exp(lambda (1 - w))."""

    k_positive: Positive = 2.0
    """k where the advantage is not negative (vespo)."""
    lambda_positive: Positive = 3.0
    """lambda where the advantage is not negative (vespo)."""
    k_negative: Positive = 3.0
    """k elsewhere (vespo)."""
    lambda_negative: Positive = 2.0
    """lambda elsewhere (vespo)."""


class DppoConfig(Section):
    """The trust region of a token around the engine's probability."""

    divergence: Literal["tv", "kl"] = "tv"
    """What eps_clip and eps_clip_high bound: the total variation or the KL of two outcomes, the token and any
    other (dppo)."""


class RaeConfig(Section):
    """The baseline of a role: its mean reward so far."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Share of the baseline that is left after another rollout (rae)."""


class ClipCovConfig(Section):
    """Likely tokens with a high advantage lose their gradient: a few of them, drawn."""

    ratio: ShareAboveZero = 2e-4
    """Share of tokens that lose it (clip_cov)."""
    low: float = 1.0
    """Least covariance of logprob and advantage of these (clip_cov)."""
    high: float = 5.0
    """Largest covariance of these (clip_cov)."""

    @model_validator(mode="after")
    def _bounds(self) -> ClipCovConfig:
        if self.low >= self.high:
            raise ValueError(f"clip_cov_low ({self.low:g}) must be below clip_cov_high ({self.high:g}).")
        return self


class KlCovConfig(Section):
    """Likely tokens with a high advantage are held near the policy before the update."""

    ratio: ShareAboveZero = 2e-3
    """Share of tokens that are, those with the largest covariance of logprob and advantage (kl_cov)."""
    coef: Positive = 1.0
    """Weight of the penalty for their distance (kl_cov)."""


class TopEntropyConfig(Section):
    """Only tokens where the policy is uncertain are learned from."""

    quantile: ShareAboveZero = 0.2
    """Share of tokens that keep their gradient, those of the highest entropy (top_entropy)."""


class GdpoConfig(Section):
    """Several rewards, each of which is normalised by itself."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward by its name, such as {env = 1.0, brevity = 0.2}; left out, each reward counts 1
    (gdpo; a table; as a flag: JSON)."""


class GigpoConfig(Section):
    """Turns that began in one state, compared beside whole episodes."""

    step_advantage_weight: Positive = 1.0
    """Weight of the advantage of a turn among those from the same state, beside the episode's (gigpo)."""


class HierarchyConfig(Section):
    """Several agents in one role, and rewards that include what another role has achieved."""

    roles: dict[str, str] = Field(default_factory=dict)
    """Role of each agent by its name or a pattern, such as {"searcher_*" = "searcher"}: agents of one role
    are siblings, also in one episode; left out, each agent is a role of its own (a table; as a flag:
    JSON)."""
    reward_shares: dict[str, dict[str, Finite]] = Field(default_factory=dict)
    """For a role, shares of the mean rewards of other roles in the episode that are added to its own reward,
    such as {searcher = {planner = 0.5}} (a table; as a flag: JSON)."""

    @property
    def is_set(self) -> bool:
        """Whether anything of it applies."""
        return bool(self.roles or self.reward_shares)

    @model_validator(mode="after")
    def _names(self) -> HierarchyConfig:
        if empty := [pattern for pattern, role in self.roles.items() if not (pattern and role)]:
            raise ValueError(f"hierarchy_roles needs a name and a role, got {empty[0]!r}; leave it out.")
        for role, shares in self.reward_shares.items():
            if not shares or role in shares:
                raise ValueError(
                    f"hierarchy_reward_shares of {role} must name other roles, such as "
                    f"{{{role} = {{planner = 0.5}}}}; name some, or leave it out."
                )
            for name in (role, *shares):
                if (own := role_of(name, self.roles)) != name:
                    raise ValueError(
                        f"hierarchy_reward_shares names {name}, which hierarchy_roles gives the role {own}; "
                        "name the role."
                    )
        return self


class ShapingConfig(Section):
    """What an estimator compares in place of scores; those that are journalled and logged do not change."""

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
    overlong_buffer_len: Annotated[int, Field(ge=1)] = 256
    """Further tokens over which the penalty grows to its full size (shaping_overlong_len; tokens)."""
    overlong_penalty: NotNegative = 1.0
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
