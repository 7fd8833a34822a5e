"""Factors that correct for differences between the engine's sampling probabilities and the trainer's.

ratio[t] = exp(proximal logprob - behaviour logprob): the trainer's probability of a token, before the first
update of the batch, over the engine's, when it was sampled. A correction maps ratios to factors for the
advantages, [N]. Weights do not depend on them, so a factor of 0 changes no denominator. All trainable tokens
of an episode, over all its samples, are one sequence here: splitting an episode changes nothing.

The loss clips another ratio, r = current over proximal (`agentrl.losses.PolicyLoss`). Since a factor is never
negative, factor x max(-A r, -A clip(r)) is the loss of a token whose advantage is factor x A. So below its
bound `Tis` makes of the clipped loss the decoupled objective, whose factor is the ratio itself (J. Hilton et
al., Batch size-invariance for policy optimization, https://arxiv.org/abs/2110.00641). `IcePop` with `low` = 0
leaves out what is beyond the bound, as https://arxiv.org/abs/2505.24298 does in asynchronous training.

Log-ratios are clipped to -20 .. 20 before they are exponentiated, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.errors import UserError
from agentrl.types import FloatArray, Sample, Scores

MAX_LOG_RATIO = 20.0


class Corrected(NamedTuple):
    """Factors on the advantages, [N], and metrics (means over trainable tokens, unless stated otherwise).

    clipped_N: the tokens whose ratio was beyond a bound.
    """

    factors_N: Floats
    metrics: Mapping[str, float]
    clipped_N: npt.NDArray[np.bool_]


Statistic = Literal["k1", "k2", "k3"]


class TokenFactors(NamedTuple):
    """The factor of a token by its own ratio: a trainer computes it where its logprobs are.

    low, high: bounds of the ratio; beyond them the factor is the bound, or 0 where it `masks`. gate: a
    statistic (`agentrl.algorithms.gates`) and its bounds, beyond which the factor is 0; None = there is none.
    """

    low: float
    high: float
    masks: bool = False
    gate: tuple[Statistic, float, float] | None = None

    def bounded(self, ratio_N: Floats) -> Floats:
        """The factors before a gate."""
        if self.masks:
            return np.where((ratio_N >= self.low) & (ratio_N <= self.high), ratio_N, 0.0)
        return np.clip(ratio_N, self.low, self.high)


class Correction(Protocol):
    """From tokens and their scores to factors."""

    @property
    def of_tokens(self) -> TokenFactors | None:
        """The factors, where each depends on its token only; None = on others of its sequence, too."""

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`."""


@dataclass(frozen=True, slots=True)
class FactorsInStep:
    """A correction as a trainer calls it, for the samples of one micro-batch and their logprobs.

    The factors are those that it has for the rollout batch, as long as each sequence is one of these samples
    or has factors `of_tokens`.
    """

    correction: Correction

    def __call__(self, samples: Sequence[Sample], proximal: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
        """Factors, one float32 [T] array for each sample, 0 off its loss mask.

        Raises:
            ValueError: a logprob is not finite.
        """
        tokens = Tokens.of(samples)
        scores = tokens.scores(Scores(tuple(proximal)))
        return tokens.scatter(self.correction(tokens, scores).factors_N)


@dataclass(frozen=True, slots=True)
class Tis:
    """Truncated importance sampling: factor = ratio, clipped to tis_clip_low .. tis_clip.

    Source: F. Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025);
    truncating ratios from above: https://arxiv.org/abs/1802.01561.

    Metrics: tis (the ratio), tis_abs (how far it is from 1), tis_clipfrac (ratios that were changed),
    tis_factor (the factor).

    Raises:
        ValueError: the bounds are not 0 <= tis_clip_low < tis_clip.
    """

    tis_clip: float = 2.0
    tis_clip_low: float = 0.0

    def __post_init__(self) -> None:
        _check_bounds(self.tis_clip_low, self.tis_clip)

    @property
    def of_tokens(self) -> TokenFactors:
        """Each ratio, clipped."""
        return TokenFactors(self.tis_clip_low, self.tis_clip)

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`."""
        ratio_N = _ratio(log_ratios(scores))
        return _corrected("tis", tokens, ratio_N, self.of_tokens.bounded(ratio_N))


@dataclass(frozen=True, slots=True)
class IcePop:
    """Masking on both sides: factor = ratio inside low .. high, the bounds included, else 0.

    Source: https://arxiv.org/abs/2510.18855.

    Metrics: icepop (the ratio), icepop_abs (how far it is from 1), icepop_clipfrac (tokens masked),
    icepop_factor (the factor).

    Raises:
        ValueError: the bounds are not 0 <= low < high.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    @property
    def of_tokens(self) -> TokenFactors:
        """Each ratio, masked."""
        return TokenFactors(self.low, self.high, masks=True)

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`."""
        ratio_N = _ratio(log_ratios(scores))
        return _corrected("icepop", tokens, ratio_N, self.of_tokens.bounded(ratio_N))


@dataclass(frozen=True, slots=True)
class Mis:
    """Importance sampling with a choice of level and of the treatment of ratios beyond the bounds.

    level: token: each token's own ratio. sequence: the product of all of the sequence's, unbiased and of
        high variance. geometric: their geometric mean, which does not depend on length.
    mode: truncate: ratios above `upper` become `upper`. clip: ratios below `lower` become `lower`, too. mask:
        factors outside lower .. upper become 0, those inside are their ratio.
    veto: a sequence that holds a token with a ratio below it is dropped as a whole; None: none is.

    Source: J. Liu, Y. Li et al., When Speed Kills Stability (2025).

    Metrics: mis (the ratio), mis_abs (how far it is from 1), mis_clipfrac (ratios that were changed),
    mis_factor (the factor), mis_masked (factors of 0), mis_veto (dropped sequences, as a share of those with
    trainable tokens).

    Raises:
        ValueError: the bounds are not 0 <= lower < upper, or veto is not between 0 and 1.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "clip", "mask"] = "truncate"
    lower: float = 0.5
    upper: float = 2.0
    veto: float | None = None

    def __post_init__(self) -> None:
        _check_bounds(self.lower, self.upper)
        if self.veto is not None and not 0.0 < self.veto < 1.0:
            raise ValueError(f"veto is a ratio between 0 and 1, such as 1e-4, got {self.veto}")

    @property
    def of_tokens(self) -> TokenFactors | None:
        """None where the ratio or a veto is that of a sequence."""
        return self._bounds if self.level == "token" and self.veto is None else None

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`."""
        log_ratio_N = log_ratios(scores)
        ratio_N = _ratio(self._levelled(log_ratio_N, tokens))
        factor_N = self._bounds.bounded(ratio_N)
        bounded = _corrected("mis", tokens, ratio_N, factor_N)
        dropped_E = self._dropped(log_ratio_N, tokens)
        factor_N = np.where(dropped_E[tokens.rollout_index_N], 0.0, factor_N)
        metrics = {
            **bounded.metrics,
            "mis_factor": tokens.mean(factor_N),
            "mis_masked": tokens.mean((factor_N == 0.0).astype(np.float64)),
            "mis_veto": float(dropped_E.sum()) / max(len(np.unique(tokens.rollout_index_N)), 1),
        }
        return bounded._replace(factors_N=factor_N, metrics=metrics)

    @property
    def _bounds(self) -> TokenFactors:
        return TokenFactors(
            0.0 if self.mode == "truncate" else self.lower, self.upper, masks=self.mode == "mask"
        )

    def _levelled(self, log_ratio_N: Floats, tokens: Tokens) -> Floats:
        if self.level == "token":
            return log_ratio_N
        sums_E: Floats = np.bincount(tokens.rollout_index_N, weights=log_ratio_N).astype(np.float64)
        if self.level == "geometric":
            sums_E = sums_E / np.maximum(np.bincount(tokens.rollout_index_N), 1)
        levelled: Floats = sums_E[tokens.rollout_index_N]
        return levelled

    def _dropped(self, log_ratio_N: Floats, tokens: Tokens) -> npt.NDArray[np.bool_]:
        dropped_E = np.zeros(len(tokens.rollout_ids), dtype=bool)
        if self.veto is not None:
            dropped_E[tokens.rollout_index_N[log_ratio_N < np.log(self.veto)]] = True
        return dropped_E


CorrectionFunction: TypeAlias = Callable[[Tokens, TokenScores], Floats | Corrected]
"""From the tokens of a batch and their scores to factors, [N], each finite and not negative."""


@dataclass(frozen=True, slots=True)
class CustomCorrection:
    """The factors of a function, which sees the whole batch.

    Metrics: custom (the ratio), custom_abs (how far it is from 1), custom_clipfrac (tokens whose factor is
    another number), custom_factor (the factor); or those that the function returns.
    """

    function: CorrectionFunction
    of_tokens: ClassVar[None] = None

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`.

        Raises:
            UserError: the function returned something else.
        """
        returned = self.function(tokens, scores)
        try:
            return as_corrected(returned, tokens, scores)
        except ValueError as error:
            raise UserError(f"the correction function: {error}; mend it.") from error


def as_corrected(returned: object, tokens: Tokens, scores: TokenScores) -> Corrected:
    """What a `CorrectionFunction` returned.

    Raises:
        ValueError: it is anything but one finite number, not below 0, for each token.
    """
    factors = returned.factors_N if isinstance(returned, Corrected) else returned
    if not isinstance(factors, np.ndarray) or factors.shape != (len(tokens),):
        what = f"{factors.shape}" if isinstance(factors, np.ndarray) else type(factors).__name__
        raise ValueError(f"it returns one factor for each of {len(tokens)} tokens, not {what}")
    if not (np.isfinite(factors).all() and (factors >= 0.0).all()):
        raise ValueError("it returns factors that are not finite, or below 0; bound them")
    if isinstance(returned, Corrected):
        return returned
    return _corrected("custom", tokens, _ratio(log_ratios(scores)), factors.astype(np.float64))


_ACTIONS: Mapping[str, Sequence[str]] = {
    "tis": ("tis_clipfrac",),
    "mis": ("mis_clipfrac", "mis_veto"),
    "icepop": ("icepop_clipfrac",),
    "opsm": ("opsm_masked",),
    "gate": ("gate_masked",),
}
"""The metrics of each correction that are above 0 where one of its bounds had an effect."""


@dataclass(slots=True)
class CorrectionWatch:
    """Warns once of a correction whose bounds have no effect.

    correction: its name in the configuration, or gate; others are ignored. patience: optimizer steps in a
    row without an effect before the warning. idle_steps: those so far.
    """

    correction: str = "none"
    patience: int = 20
    idle_steps: int = 0
    warned: bool = False

    def warnings(self, metrics: Mapping[str, float], *, num_steps: int) -> tuple[str, ...]:
        """The warnings after `num_steps` more optimizer steps with these metrics (train/...)."""
        names = _ACTIONS.get(self.correction, ())
        if not names or self.warned:
            return ()
        had_effect = any(metrics.get(f"train/{name}", 0.0) > 0.0 for name in names)
        self.idle_steps = 0 if had_effect else self.idle_steps + num_steps
        if self.idle_steps < self.patience:
            return ()
        self.warned = True
        setting = "the gate" if self.correction == "gate" else f"correction = {self.correction}"
        return (
            f"{setting} changed no token in {self.idle_steps} optimizer steps: none was "
            "beyond its bounds; narrow them, or leave it out.",
        )


def log_ratios(scores: TokenScores) -> Floats:
    """Proximal logprobs minus those of the behaviour policy, [N], in nats."""
    return scores.proximal_N - scores.behaviour_N


def _ratio(log_ratio_N: Floats) -> Floats:
    ratio: Floats = np.exp(np.clip(log_ratio_N, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio


def _corrected(name: str, tokens: Tokens, ratio_N: Floats, factor_N: Floats) -> Corrected:
    clipped_N = factor_N != ratio_N
    metrics = {
        name: tokens.mean(ratio_N),
        f"{name}_abs": tokens.mean(np.abs(ratio_N - 1.0)),
        f"{name}_clipfrac": tokens.mean(clipped_N.astype(np.float64)),
        f"{name}_factor": tokens.mean(factor_N),
    }
    return Corrected(factor_N, metrics, clipped_N)


def _check_bounds(low: float, high: float) -> None:
    if not 0.0 <= low < high:
        raise ValueError(f"a ratio is kept between bounds 0 <= low < high, got {low} and {high}")
