"""Settings of corrections: one table for each."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config import Section

CorrectionName = Literal["none", "tis", "mis", "icepop", "opsm"]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]


class TisConfig(Section):
    """Truncated importance sampling: the factor of a token is its ratio, clipped to two bounds."""

    clip: Positive = 2.0
    """Largest factor of a token (tis)."""
    clip_low: NotNegative = 0.0
    """Smallest factor of a token (tis)."""

    @model_validator(mode="after")
    def _bounds(self) -> TisConfig:
        _check_bounds("tis_clip", self.clip_low, self.clip)
        return self


class MisConfig(Section):
    """Importance sampling by tokens or by sequences, with a choice of what happens beyond the bounds."""

    level: Literal["token", "sequence", "geometric"] = "geometric"
    """Whose ratio: each token's, the whole sequence's, or its geometric mean per token (mis)."""
    mode: Literal["truncate", "clip", "mask"] = "mask"
    """What happens beyond the bounds: the factor becomes the bound above, either bound, or 0 (mis)."""
    lower: NotNegative | None = None
    """Lower bound (mis; ratio); left out, 0.5 for tokens and sequences, 0.999 for a geometric mean."""
    upper: Positive | None = None
    """Upper bound (mis; ratio); left out, 2 for tokens and sequences, 1.001 for a geometric mean."""
    veto: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Drop a sequence with a token whose ratio is below this (mis); left out, none."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds. A mean over a sequence varies little, so a bound for tokens would have no effect."""
        low, high = (0.999, 1.001) if self.level == "geometric" else (0.5, 2.0)
        return (low if self.lower is None else self.lower, high if self.upper is None else self.upper)

    @model_validator(mode="after")
    def _bounds(self) -> MisConfig:
        _check_bounds("mis", *self.bounds)
        return self


class IcePopConfig(Section):
    """The factor of a token is its ratio, and 0 beyond the bounds."""

    low: NotNegative = 0.5
    """Smallest ratio of a token that counts (icepop)."""
    high: Positive = 5.0
    """Largest ratio of a token that counts (icepop)."""

    @model_validator(mode="after")
    def _bounds(self) -> IcePopConfig:
        _check_bounds("icepop", self.low, self.high)
        return self


_UPPER = {"token": 0.3, "mean": 0.01, "sum": 1.0, "max": 0.3}


class GateConfig(Section):
    """What is masked because engine and trainer differ too much: tokens, or whole sequences."""

    statistic: Literal["none", "k1", "k2", "k3"] = "none"
    """What is compared with the bounds: the log-ratio d of trainer and engine (k1), d^2 / 2 (k2) or
    exp(d) - 1 - d (k3); none = no gate."""
    over: Literal["token", "mean", "sum", "max"] = "mean"
    """Whose statistic: each token's, or the mean, sum or maximum over its sequence, which is masked as a
    whole (gate_statistic)."""
    lower: float | None = None
    """Lower bound (gate_statistic = k1; nats); left out, minus the upper one."""
    upper: Positive | None = None
    """Upper bound (gate_statistic; nats); left out, 0.01 for a mean, 0.3 for a token or a maximum, 1 for a
    sum."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds (nats)."""
        upper = _UPPER[self.over] if self.upper is None else self.upper
        lower = -upper if self.lower is None else self.lower
        return (lower if self.statistic == "k1" else -math.inf, upper)

    @model_validator(mode="after")
    def _bounds(self) -> GateConfig:
        _check_bounds("gate", *self.bounds)
        return self


class OpsmConfig(Section):
    """Off-policy sequence masking, in the loss."""

    delta: Positive = 1e-4
    """How far the policy may have moved from a sequence with a negative advantage: mean of the engine's
    logprobs minus the policy's (opsm; nats per token)."""


def _check_bounds(name: str, low: float, high: float) -> None:
    if low >= high:
        raise ValueError(
            f"the lower bound of {name} ({low:g}) must be below the upper ({high:g}); change one."
        )
