"""Entropy control: which tokens may move the policy, chosen over a complete rollout batch.

A policy gradient lowers the entropy by the covariance, over tokens, of logprob and advantage: likely tokens
with a high advantage become likelier still. N: the trainable tokens of the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.config import Positive, ShareAboveZero, Variant


class Controlled(NamedTuple):
    """factors_N: of the advantages. kl_cov_N: coefficients of a penalty for each token's distance from the
    proximal policy; None = there is none. metrics: by name, see each control."""

    factors_N: Floats
    metrics: Mapping[str, float]
    kl_cov_N: Floats | None = None


class EntropyControl(Protocol):
    """Chooses tokens of a rollout batch."""

    def __call__(self, advantages_N: Floats, tokens: Tokens, scores: TokenScores) -> Controlled:
        """What becomes of `tokens`, whose advantages these are."""


@dataclass(frozen=True, slots=True)
class ClipCov:
    """Takes the policy gradient of a few tokens whose covariance is high: factor 0.

    With cov = (A - mean A) x (logp - mean logp), over the batch and with the proximal logprobs: of the tokens
    whose cov is above low and below high, ratio x N are drawn, at least one. The draw depends on the ids of
    the rollouts only.

    Source: https://arxiv.org/abs/2505.22617 (Clip-Cov). There cov is of the current
    policy, which in the first optimizer step of a batch is the proximal one.

    Metrics: clip_cov_fraction (tokens that lost their gradient, as a share).

    Raises:
        ValueError: ratio is not above 0 and at most 1, or low is not below high.
    """

    ratio: float = 2e-4
    low: float = 1.0
    high: float = 5.0

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)
        if not self.low < self.high:
            raise ValueError(f"clip_cov needs low < high, got {self.low} and {self.high}")

    def __call__(self, advantages_N: Floats, tokens: Tokens, scores: TokenScores) -> Controlled:
        """Factors of `tokens`."""
        covariance_N = _covariances(advantages_N, scores)
        candidates = np.flatnonzero((covariance_N > self.low) & (covariance_N < self.high))
        number = min(max(int(self.ratio * len(tokens)), 1), len(candidates))
        drawn = candidates[np.argsort(_uniform(tokens)[candidates], kind="stable")[:number]]
        factors_N = np.ones(len(tokens))
        factors_N[drawn] = 0.0
        return Controlled(factors_N, {"clip_cov_fraction": number / max(len(tokens), 1)})


@dataclass(frozen=True, slots=True)
class KlCov:
    """Holds the tokens of the highest covariance near the proximal policy.

    The ratio x N tokens with the largest covariance (see `ClipCov`), at least one, get a penalty in the loss:
    coef x |logp - proximal logp|. It has no gradient where the two differ by rounding alone
    (`LossInputs.rounding`), as in the first optimizer step of a batch whose proximal logprobs the trainer
    computes.

    Source: https://arxiv.org/abs/2505.22617 (KL-Cov). There the ratio of the loss is not clipped, and neither
    is it in a run with the objective clip, unless its bounds are set.

    Metrics: kl_cov_fraction (tokens under the penalty, as a share).

    Raises:
        ValueError: ratio is not above 0 and at most 1, or coef is not above 0.
    """

    ratio: float = 2e-3
    coef: float = 1.0

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)
        if not self.coef > 0.0:
            raise ValueError(f"kl_cov needs a coef above 0, got {self.coef}")

    def __call__(self, advantages_N: Floats, tokens: Tokens, scores: TokenScores) -> Controlled:
        """Coefficients of `tokens`."""
        number = min(max(int(self.ratio * len(tokens)), 1), len(tokens))
        highest = np.argsort(-_covariances(advantages_N, scores), kind="stable")[:number]
        kl_cov_N = np.zeros(len(tokens))
        kl_cov_N[highest] = self.coef
        return Controlled(np.ones(len(tokens)), {"kl_cov_fraction": number / max(len(tokens), 1)}, kl_cov_N)


@dataclass(frozen=True, slots=True)
class TopEntropy:
    """Only the tokens of the highest entropy have a policy gradient.

    quantile: the share of tokens that keep theirs, those with the highest entropy (nats) of the policy before
    the update; others get the factor 0. Ties with the lowest of these keep theirs, too.

    Source: https://arxiv.org/abs/2506.01939, which keeps the top 20%.

    Metrics: top_entropy_threshold (the lowest entropy that is kept, nats), top_entropy_fraction (tokens kept,
    as a share).

    Raises:
        ValueError: quantile is not above 0 and at most 1.
    """

    quantile: float = 0.2

    def __post_init__(self) -> None:
        _check_share("quantile", self.quantile)

    def __call__(self, advantages_N: Floats, tokens: Tokens, scores: TokenScores) -> Controlled:
        """Factors of `tokens`.

        Raises:
            ValueError: the scores have no entropies.
        """
        del advantages_N
        if scores.entropy_N is None:
            raise ValueError("top_entropy needs the entropies of the policy; let the trainer score the batch")
        if not len(tokens):
            return Controlled(np.ones(0), {"top_entropy_fraction": 0.0, "top_entropy_threshold": 0.0})
        number = max(int(np.ceil(self.quantile * len(tokens))), 1)
        threshold = float(np.partition(scores.entropy_N, -number)[-number])
        factors_N = (scores.entropy_N >= threshold).astype(np.float64)
        metrics = {"top_entropy_fraction": float(factors_N.mean()), "top_entropy_threshold": threshold}
        return Controlled(factors_N, metrics)


def _covariances(advantages_N: Floats, scores: TokenScores) -> Floats:
    """(A - mean A) x (logp - mean logp) of each token, [N]."""
    if not len(advantages_N):
        return advantages_N.copy()
    logp_N = scores.proximal_N
    covariances: Floats = (advantages_N - advantages_N.mean()) * (logp_N - logp_N.mean())
    return covariances


def _uniform(tokens: Tokens) -> Floats:
    """A random number of each token, [N], from the id of its rollout and its place there."""
    parts = [
        np.random.default_rng(zlib.crc32("/".join(id).encode())).random(stop - start)
        for id, (start, stop) in zip(tokens.rollout_ids, pairwise(tokens.bounds.tolist()), strict=True)
    ]
    return np.concatenate([np.zeros(0), *parts])


def _check_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} is a share above 0 and at most 1, got {value}")


class EntropyConfig(Variant):
    """Which tokens lose their gradient, or are held, so that the entropy stays up."""

    compares_tokens: ClassVar[bool] = True
    """Whether what becomes of a token depends on all tokens of the batch."""
    needs_statistics: ClassVar[bool] = False
    """Whether the trainer computes statistics of its distributions, see `Trainer.score`."""

    def control(self) -> EntropyControl | None:
        """What acts on advantages; None = nothing."""


class NoEntropyConfig(EntropyConfig):
    """All tokens are learned from."""

    name: Literal["none"] = "none"
    compares_tokens: ClassVar[bool] = False


class ClipCovConfig(EntropyConfig):
    """Likely tokens with a high advantage lose their gradient: a few of them, drawn."""

    name: Literal["clip_cov"] = "clip_cov"
    prefix: ClassVar[str] = "clip_cov"

    ratio: ShareAboveZero = 2e-4
    """Share of tokens that lose it."""
    low: float = 1.0
    """Least covariance of logprob and advantage of these."""
    high: float = 5.0
    """Largest covariance of these."""

    def control(self) -> EntropyControl:
        """What acts on advantages."""
        return ClipCov(self.ratio, self.low, self.high)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"clip_cov_low ({self.low:g}) must be below clip_cov_high ({self.high:g}).")
        return self


class KlCovConfig(EntropyConfig):
    """Likely tokens with a high advantage are held near the policy before the update."""

    name: Literal["kl_cov"] = "kl_cov"
    prefix: ClassVar[str] = "kl_cov"

    ratio: ShareAboveZero = 2e-3
    """Share of tokens that are, those with the largest covariance of logprob and advantage."""
    coef: Positive = 1.0
    """Weight of the penalty for their distance."""

    def control(self) -> EntropyControl:
        """What acts on advantages, and on the loss."""
        return KlCov(self.ratio, self.coef)


class TopEntropyConfig(EntropyConfig):
    """Only tokens where the policy is uncertain are learned from."""

    name: Literal["top_entropy"] = "top_entropy"
    prefix: ClassVar[str] = "top_entropy"
    needs_statistics: ClassVar[bool] = True

    quantile: ShareAboveZero = 0.2
    """Share of tokens that keep their gradient, those of the highest entropy."""

    def control(self) -> EntropyControl:
        """What acts on advantages."""
        return TopEntropy(self.quantile)


EntropyChoice = Annotated[
    NoEntropyConfig | ClipCovConfig | KlCovConfig | TopEntropyConfig, Field(discriminator="name")
]
