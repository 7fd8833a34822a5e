"""Settings of single estimators, of shaped rewards and of entropy control: tables of `[algorithm]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.algorithms.correction_config import NotNegative, Positive
from agentrl.config import Section

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
