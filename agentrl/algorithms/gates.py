"""Gates: tokens or whole sequences whose probabilities differ too much between engine and trainer are masked.

A gate decides what is kept, a weight how much of it (`agentrl.algorithms.corrections`); a run may use both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.corrections import (
    MAX_LOG_RATIO,
    Corrected,
    Correction,
    Statistic,
    TokenFactors,
    log_ratios,
)
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores

Over = Literal["token", "mean", "sum", "max"]

_ONE = TokenFactors(1.0, 1.0)
"""The factor 1, whatever the ratio."""


class Gated(NamedTuple):
    """is_open_N: the tokens that are kept. metrics: see `TokenGate`."""

    is_open_N: npt.NDArray[np.bool_]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TokenGate:
    """Masks tokens, or all tokens of a sequence, whose statistic is outside lower .. upper (nats).

    With d = proximal - behaviour logprob of a token, clipped to -20 .. 20:

        k1   d                      of either sign: both bounds apply
        k2   d^2 / 2                never negative, symmetric
        k3   exp(d) - 1 - d         never negative; its expectation is KL(behaviour, proximal)

    over: token: each token's own statistic. mean, sum, max: that of its sequence, so that all of its tokens
    are kept or none. All trainable tokens of an episode, over all its samples, are one sequence.

    Source: https://arxiv.org/abs/2512.23075 (trust region masking: a sequence is masked as a whole, by the
    largest divergence of its tokens or by their mean, which k3 estimates). For max, k2 is a bound on |d|.

    Metrics: gate_statistic (mean over tokens of what was compared), gate_masked (masked tokens, as a share),
    gate_dropped (sequences without a token left, as a share).

    Raises:
        ValueError: a name is unknown, or the bounds are not lower < upper, with upper above 0.
    """

    statistic: Statistic = "k3"
    over: Over = "mean"
    upper: float = 0.01
    lower: float = -math.inf

    def __post_init__(self) -> None:
        if self.statistic not in get_args(Statistic) or self.over not in get_args(Over):
            raise ValueError(f"no gate by {self.statistic!r} over {self.over!r}")
        if not (self.lower < self.upper and self.upper > 0.0):
            raise ValueError(f"a gate needs lower < upper and 0 < upper, got {self.lower} and {self.upper}")

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Gated:
        """What `tokens` are kept."""
        value_N = self._levelled(self._statistic(log_ratios(scores)), tokens)
        is_open_N = (value_N >= self.lower) & (value_N <= self.upper)
        kept_E = np.bincount(tokens.rollout_index_N, weights=is_open_N, minlength=len(tokens.rollout_ids))
        present_E = np.bincount(tokens.rollout_index_N, minlength=len(tokens.rollout_ids)) > 0
        metrics = {
            "gate_statistic": tokens.mean(value_N),
            "gate_masked": tokens.mean((~is_open_N).astype(np.float64)),
            "gate_dropped": float((kept_E[present_E] == 0).sum()) / max(int(present_E.sum()), 1),
        }
        return Gated(is_open_N, metrics)

    def _statistic(self, log_ratio_N: Floats) -> Floats:
        d_N = np.clip(log_ratio_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.statistic == "k1":
            return d_N
        return 0.5 * d_N**2 if self.statistic == "k2" else np.expm1(d_N) - d_N

    def _levelled(self, value_N: Floats, tokens: Tokens) -> Floats:
        if self.over == "token":
            return value_N
        index_N, size = tokens.rollout_index_N, len(tokens.rollout_ids)
        if self.over == "max":
            values_E = np.full(size, -math.inf)
            np.maximum.at(values_E, index_N, value_N)
        else:
            values_E = np.bincount(index_N, weights=value_N, minlength=size).astype(np.float64)
            if self.over == "mean":
                values_E = values_E / np.maximum(np.bincount(index_N, minlength=size), 1)
        levelled: Floats = values_E[index_N]
        return levelled


@dataclass(frozen=True, slots=True)
class InStages:
    """A weight for each token, then a gate: factor = weight, normalised, where the gate is open, else 0.

    self_normalized: the weights are divided by their mean over the rollout batch, so that they change the
    direction of the gradient and not its length: over "token"s, or over "sequence"s, each of which counts
    once, where all tokens of one have the same weight. None: they are not. A mean of 0 changes nothing.

    Source: self-normalised importance sampling, A. B. Owen, Monte Carlo theory, methods and examples, section
    9.2. What the gate masks counts in that mean, so the gate does not change the weight of what is kept.

    Metrics: those of the weight and of the gate, and correction_norm (the mean that weights were divided by).
    """

    weight: Correction | None = None
    gate: TokenGate | None = None
    self_normalized: Literal["token", "sequence"] | None = None

    @property
    def of_tokens(self) -> TokenFactors | None:
        """None where weight, mean or gate is not that of a token."""
        weight = _ONE if self.weight is None else self.weight.of_tokens
        if weight is None or weight.gate is not None or self.self_normalized is not None:
            return None
        if self.gate is None:
            return weight
        gate = (self.gate.statistic, self.gate.lower, self.gate.upper)
        return weight._replace(gate=gate) if self.gate.over == "token" else None

    def __call__(self, tokens: Tokens, scores: TokenScores) -> Corrected:
        """Factors for `tokens`."""
        ones_N, closed_N = np.ones(len(tokens)), np.zeros(len(tokens), dtype=bool)
        weighed = Corrected(ones_N, {}, closed_N) if self.weight is None else self.weight(tokens, scores)
        factors_N, metrics, clipped_N = weighed.factors_N, dict(weighed.metrics), weighed.clipped_N
        if self.self_normalized is not None:
            metrics["correction_norm"] = norm = self._norm(factors_N, tokens)
            factors_N = factors_N / (norm or 1.0)
        if self.gate is not None:
            is_open_N, gate_metrics = self.gate(tokens, scores)
            factors_N, clipped_N = np.where(is_open_N, factors_N, 0.0), clipped_N | ~is_open_N
            metrics |= gate_metrics
        return Corrected(factors_N, metrics, clipped_N)

    def _norm(self, factors_N: Floats, tokens: Tokens) -> float:
        if self.self_normalized == "token":
            return tokens.mean(factors_N)
        firsts = np.unique(tokens.rollout_index_N, return_index=True)[1]
        return float(factors_N[firsts].mean()) if len(firsts) else 0.0
