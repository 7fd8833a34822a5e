"""Estimates of KL(policy, reference) from one sampled token each, and the penalty built on them.

Sign: d = logp - ref_logp, positive where the policy's probability of its token is above the reference's. Over
tokens that the policy sampled itself, the mean of d is the divergence.

k1, k2 and k3 are J. Schulman's names; k3 as a penalty in the loss is equation 4 of
https://arxiv.org/abs/2402.03300. Their gradients are analysed apart from their means in
https://arxiv.org/abs/2506.09477.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]

MAX_LOG_RATIO = 20.0
"""Log-ratios (nats) are capped here before they are exponentiated, so that nothing overflows."""

_LOW_VAR_BOUND = 10.0


def capped_exp(log_ratio_N: Tensor) -> Tensor:
    """exp of log-ratios, capped at 20 nats; beyond that the value is constant, without a gradient."""
    return torch.exp(torch.clamp(log_ratio_N, max=MAX_LOG_RATIO))


def k1(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """The difference d itself. Unbiased, of either sign; the expectation of its own gradient is 0."""
    return logp_N - ref_logp_N


def k2(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """d^2 / 2, never negative. On-policy the expectation of its gradient is that of the divergence."""
    return 0.5 * (logp_N - ref_logp_N).square()


def k3(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, never negative and unbiased.

    The expectation of its own gradient is that of KL(reference, policy). Below d = -20 it is constant and has
    no gradient.
    """
    d_N = torch.clamp(logp_N - ref_logp_N, min=-MAX_LOG_RATIO)
    # expm1: for small d the three parts cancel down to d^2 / 2.
    return torch.expm1(-d_N) + d_N


def low_var_kl(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """`k3` between -10 and 10; no gradient beyond."""
    return torch.clamp(k3(logp_N, ref_logp_N), -_LOW_VAR_BOUND, _LOW_VAR_BOUND)


KL_ESTIMATES: dict[KlKind, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
}


@dataclass(frozen=True, slots=True)
class KlTerm:
    """A penalty of coef x estimate for each token.

    unbiased: multiply the estimate by ratio = exp(logp - proximal_logp), through which the gradient
    flows, too. Then it is unbiased also for tokens that another policy sampled, and for k1 and k3 so
    is its gradient, which for k3 is ratio x d: https://arxiv.org/abs/2512.02556, equation 7.

    Raises:
        ValueError: an unknown kind, or a coefficient that is negative or not finite.
    """

    coef: float
    kind: KlKind = "low_var_kl"
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KL_ESTIMATES:
            raise ValueError(f"kind must be one of {', '.join(KL_ESTIMATES)}, got {self.kind!r}")
        if not 0.0 <= self.coef < math.inf:
            raise ValueError(f"coef must be at least 0, got {self.coef}")

    def estimate(self, logp_N: Tensor, ref_logp_N: Tensor, proximal_logp_N: Tensor) -> Tensor:
        """The estimates, [N], in nats, without the coefficient."""
        estimate_N = KL_ESTIMATES[self.kind](logp_N, ref_logp_N)
        if not self.unbiased:
            return estimate_N
        ratio_N = capped_exp(logp_N - proximal_logp_N)
        if self.kind in ("k1", "k2"):
            return ratio_N * estimate_N
        # The gradient of ratio x k3 is ratio x (k3 + 1 - exp(-d)) = ratio x d. It is written out: a
        # difference of two numbers as large as exp(-d) is lost to rounding, and where an estimate is
        # clipped, the gradient of the ratio only would have the wrong sign.
        slope_N = (ratio_N * (logp_N - ref_logp_N)).detach()
        if self.kind == "low_var_kl":
            slope_N = slope_N * (estimate_N.detach() < _LOW_VAR_BOUND)
        return (ratio_N * estimate_N).detach() + slope_N * (logp_N - logp_N.detach())
