"""Settings of corrections for the engine's probabilities, and of gates."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.algorithms.corrections import Correction, IcePop, Mis, Statistic, Tis
from agentrl.algorithms.gates import Over, TokenGate
from agentrl.config import ImportPath, NotNegative, Positive, Variant


class CorrectionConfig(Variant):
    """What is done about tokens whose probabilities differ between engine and trainer."""

    corrects: ClassVar[bool] = True
    """Whether it corrects for older weights."""
    compares: ClassVar[bool] = False
    """Whether it compares the engine's logprobs with the trainer's."""
    of_batch: ClassVar[bool] = False
    """Whether its factors are computed from the whole batch, before the first optimizer step."""

    @property
    def accepts_bias(self) -> bool:
        """Whether a run may train on older tokens without a correction."""
        return False

    @property
    def is_self_normalized(self) -> bool:
        """Whether its factors are divided by their mean over the batch."""
        return False

    @property
    def counted(self) -> Literal["token", "sequence"]:
        """What that mean counts."""
        return "token"

    def correction(self) -> Correction | None:
        """The factors of advantages; None = there are none."""


class NoCorrectionConfig(CorrectionConfig):
    """Nothing is done."""

    name: Literal["none"] = "none"
    corrects: ClassVar[bool] = False

    accept_bias: bool = False
    """Train above max_staleness 0 with correction = none, for experiments: the gradient is that of older
    weights, unless a loss of your own corrects it."""

    @property
    def accepts_bias(self) -> bool:
        """Whether a run may train on older tokens as they are."""
        return self.accept_bias


class ComparingConfig(CorrectionConfig):
    """One that compares the engine's logprobs with the trainer's."""

    compares: ClassVar[bool] = True

    self_normalize_correction: bool = False
    """Divide the factors of a correction by their mean over the batch."""

    @property
    def is_self_normalized(self) -> bool:
        """Whether its factors are divided by their mean over the batch."""
        return self.self_normalize_correction


class TisConfig(ComparingConfig):
    """Truncated importance sampling: the factor of a token is its ratio, clipped to two bounds."""

    name: Literal["tis"] = "tis"
    prefix: ClassVar[str] = "tis"

    clip: Positive = 2.0
    """Largest factor of a token."""
    clip_low: NotNegative = 0.0
    """Smallest factor of a token."""

    def correction(self) -> Correction:
        """The factors of advantages."""
        return Tis(self.clip, self.clip_low)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _check_bounds("tis_clip", self.clip_low, self.clip)
        return self


class MisConfig(ComparingConfig):
    """Importance sampling by tokens or by sequences, with a choice of what happens beyond the bounds."""

    name: Literal["mis"] = "mis"
    prefix: ClassVar[str] = "mis"

    level: Literal["token", "sequence", "geometric"] = "geometric"
    """Whose ratio: each token's, the whole sequence's, or its geometric mean per token."""
    mode: Literal["truncate", "clip", "mask"] = "mask"
    """What happens beyond the bounds: the factor becomes the bound above, either bound, or 0."""
    lower: NotNegative | None = None
    """Lower bound (ratio); left out, 0.5 for tokens and sequences, 0.999 for a geometric mean."""
    upper: Positive | None = None
    """Upper bound (ratio); left out, 2 for tokens and sequences, 1.001 for a geometric mean."""
    veto: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Drop a sequence with a token whose ratio is below this; left out, none."""

    @property
    def without_effect(self) -> dict[str, str]:
        """The bound below, where the factor becomes the one above alone."""
        is_truncated = self.mode == "truncate"
        return {"mis_lower": "without mis_mode = clip or mask; choose one"} if is_truncated else {}

    @property
    def counted(self) -> Literal["token", "sequence"]:
        """What the mean of the factors counts."""
        return "token" if self.level == "token" else "sequence"

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds. A mean over a sequence varies little, so a bound for tokens would have no effect."""
        low, high = (0.999, 1.001) if self.level == "geometric" else (0.5, 2.0)
        return (low if self.lower is None else self.lower, high if self.upper is None else self.upper)

    def correction(self) -> Correction:
        """The factors of advantages."""
        return Mis(self.level, self.mode, *self.bounds, self.veto)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _check_bounds("mis", *self.bounds)
        return self


class IcePopConfig(ComparingConfig):
    """The factor of a token is its ratio, and 0 beyond the bounds."""

    name: Literal["icepop"] = "icepop"
    prefix: ClassVar[str] = "icepop"

    low: NotNegative = 0.5
    """Smallest ratio of a token that counts."""
    high: Positive = 5.0
    """Largest ratio of a token that counts."""

    def correction(self) -> Correction:
        """The factors of advantages."""
        return IcePop(self.low, self.high)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _check_bounds("icepop", self.low, self.high)
        return self


class CustomConfig(ComparingConfig):
    """The factors of a function of your own."""

    name: Literal["custom"] = "custom"
    prefix: ClassVar[str] = "custom"
    of_batch: ClassVar[bool] = True

    tis_function_path: ImportPath | None = None
    """Function from the tokens of a batch and their scores to a factor of each token's advantage
    (package.module:name)."""

    @model_validator(mode="after")
    def _has_a_function(self) -> Self:
        if self.tis_function_path is None:
            raise ValueError("correction = custom is a function of your own; set custom_tis_function_path.")
        return self


class OpsmConfig(CorrectionConfig):
    """Off-policy sequence masking, in the loss."""

    name: Literal["opsm"] = "opsm"
    prefix: ClassVar[str] = "opsm"

    delta: Positive = 1e-4
    """How far the policy may have moved from a sequence with a negative advantage: mean of the engine's
    logprobs minus the policy's (nats per token)."""


CorrectionChoice = Annotated[
    NoCorrectionConfig | TisConfig | MisConfig | IcePopConfig | CustomConfig | OpsmConfig,
    Field(discriminator="name"),
]

_UPPER = {"token": 0.3, "mean": 0.01, "sum": 1.0, "max": 0.3}


class NoGateConfig(Variant):
    """Nothing is masked."""

    name: Literal["none"] = "none"

    def gate(self) -> None:
        """What masks: nothing."""


class GateConfig(Variant):
    """What is masked because engine and trainer differ too much: tokens, or whole sequences."""

    name: Statistic
    prefix: ClassVar[str] = "gate"

    over: Over = "mean"
    """Whose statistic: each token's, or the mean, sum or maximum over its sequence, which is masked as a
    whole."""
    upper: Positive | None = None
    """Upper bound (nats); left out, 0.01 for a mean, 0.3 for a token or a maximum, 1 for a sum."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds (nats)."""
        return -math.inf, _UPPER[self.over] if self.upper is None else self.upper

    def gate(self) -> TokenGate:
        """What masks."""
        lower, upper = self.bounds
        return TokenGate(self.name, self.over, upper, lower)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _check_bounds("gate", *self.bounds)
        return self


class K1GateConfig(GateConfig):
    """By the log-ratio d of trainer and engine, which has two signs."""

    name: Literal["k1"] = "k1"
    prefix: ClassVar[str] = "gate"

    lower: float | None = None
    """Lower bound (nats); left out, minus the upper one."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds (nats)."""
        _, upper = super().bounds
        return (-upper if self.lower is None else self.lower), upper


class K2GateConfig(GateConfig):
    """By d^2 / 2."""

    name: Literal["k2"] = "k2"


class K3GateConfig(GateConfig):
    """By exp(d) - 1 - d."""

    name: Literal["k3"] = "k3"


GateChoice = Annotated[NoGateConfig | K1GateConfig | K2GateConfig | K3GateConfig, Field(discriminator="name")]


def _check_bounds(name: str, low: float, high: float) -> None:
    if low >= high:
        raise ValueError(
            f"the lower bound of {name} ({low:g}) must be below the upper ({high:g}); change one."
        )
