"""Objectives of the policy: from logprobs and advantages to a term of each of N tokens.

With A the advantage, r = exp(logp - proximal_logp) and clip(x) = min(max(x, 1 - low), 1 + high), the terms to
minimise are

    clip       max(-A r, -A clip(r))
    gspo       max(-A s, -A clip(s))       s = exp(mean over the sequence of log r)
    gmpo       -A g                        g = exp(mean over the sequence of bounded(log r))
    cispo      -stop_gradient(clip(r)) x A x logp
    sapo       -A x 4 / tau x sigmoid(tau x (r - 1))
    vespo      -stop_gradient(w^k exp(lam (1 - w))) x A x logp     w = product over the sequence of r
    dppo       -M x stop_gradient(min(r, dual)) x A x logp
    reinforce  -A x logp

- clip: https://arxiv.org/abs/1707.06347, equation 7. `high` of its own (clip-higher):
  https://arxiv.org/abs/2503.14476. dual: where A < 0 the term is at most -dual x A, so that the gradient of a
  token that became far likelier is bounded (clip, gspo): https://arxiv.org/abs/1912.09729, equation 5.
- gspo: https://arxiv.org/abs/2507.18071, in its token form (GSPO-token): all tokens of a sequence have the
  value s, and the gradient of each flows through its own logp. Where a sequence has one advantage and one
  weight, that is the gradient of the plain form; where they differ (turn-level credit, corrections), each
  token has its own. The mean is over the loss tokens of one Sample. The paper's bounds are 3e-4 and 4e-4.
- gmpo: https://arxiv.org/abs/2507.20673, in a token form like that of gspo. bounded(log r) is
  min(log r, high) where A >= 0 and max(log r, -low) elsewhere: bounds are in nats, the paper's are 0.4.
- cispo: https://arxiv.org/abs/2506.13585. Usual are low = 1 (no bound below) and a high bound of several.
- sapo: https://arxiv.org/abs/2511.20347. tau is `tau[0]` where A > 0, else `tau[1]`: 1 and 1.05 in the paper.
- vespo: https://arxiv.org/abs/2602.10693. k and lam are those of `kernels[0]` where A >= 0, else of
  `kernels[1]`: 2, 3 and 3, 2 in its authors' code. The factor is 1 at w = 1. log w is kept in -20 .. 20.
- dppo_tv, dppo_kl: https://arxiv.org/abs/2602.04879. M is 0 where the update would move a token further
  from the behaviour policy and their divergence is above `high` (A > 0) or `low` (A < 0), else 1. Its two
  outcomes are this token and any other: with p = exp(logp) and q = exp(behaviour_logp), total variation is
  |p - q|, and KL is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). dual: the largest weight; left out, 20.
- reinforce: the gradient of the log-likelihood, weighted. R. J. Williams, Simple statistical
  gradient-following algorithms (1992); for GPG, https://arxiv.org/abs/2504.02546.

Log-ratios are capped at 20, so that a token that became e^20 times likelier makes neither the sum nor its
gradient infinite; no gradient flows through a ratio beyond the cap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.losses.base import LossInputs, promoted
from agentrl.losses.kl import MAX_LOG_RATIO, capped_exp
from agentrl.losses.sequences import sequence_mean, sequence_sum

Objective = Literal["clip", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "reinforce"]

_LARGEST_DPPO_WEIGHT = 20.0


class LossKernel(NamedTuple):
    """Reshapes the ratio w of a sequence: w^k exp(lam (1 - w)) (vespo)."""

    k: float
    lam: float


KERNELS = (LossKernel(2.0, 3.0), LossKernel(3.0, 2.0))


class ClipBounds(NamedTuple):
    """The numbers of an objective; each uses some of them."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    tau: tuple[float, float] = (1.0, 1.05)
    kernels: tuple[LossKernel, LossKernel] = KERNELS


class Surrogate(NamedTuple):
    """Terms to minimise, [N], and the tokens where a bound and the dual clip apply."""

    term_N: Tensor
    clipped_N: Tensor
    dual_clipped_N: Tensor


def _clip(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    return _pessimistic(capped_exp(logp_N - inputs.proximal_logp_N), inputs, bounds)


def _gspo(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    return _pessimistic(_of_sequence(logp_N - inputs.proximal_logp_N, inputs), inputs, bounds)


def _pessimistic(ratio_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    advantages_N = promoted(inputs.advantages_N)
    bounded_N = _clipped(ratio_N, bounds)
    plain_N, pessimistic_N = -advantages_N * ratio_N, -advantages_N * bounded_N
    term_N, dual_N = torch.maximum(plain_N, pessimistic_N), _none(ratio_N)
    if bounds.dual is not None:
        ceiling_N = -bounds.dual * advantages_N
        dual_N = (advantages_N < 0) & (term_N > ceiling_N)
        term_N = torch.where(dual_N, ceiling_N, term_N)
    return Surrogate(term_N, pessimistic_N > plain_N, dual_N)


def _gmpo(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    advantages_N = promoted(inputs.advantages_N)
    gap_N = logp_N - inputs.proximal_logp_N
    bounded_N = torch.where(advantages_N >= 0, gap_N.clamp(max=bounds.high), gap_N.clamp(min=-bounds.low))
    return Surrogate(-advantages_N * _of_sequence(bounded_N, inputs), bounded_N != gap_N, _none(gap_N))


def _cispo(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    ratio_N = capped_exp(logp_N - inputs.proximal_logp_N).detach()
    weight_N = _clipped(ratio_N, bounds)
    return Surrogate(-weight_N * promoted(inputs.advantages_N) * logp_N, weight_N != ratio_N, _none(ratio_N))


def _sapo(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    advantages_N = promoted(inputs.advantages_N)
    ratio_N = capped_exp(logp_N - inputs.proximal_logp_N)
    above, below = (torch.full_like(ratio_N, tau) for tau in bounds.tau)
    tau_N = torch.where(advantages_N > 0, above, below)
    gate_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0))
    return Surrogate(-advantages_N * gate_N, _none(ratio_N), _none(ratio_N))


def _vespo(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    advantages_N = promoted(inputs.advantages_N)
    gap_N = (logp_N.detach() - inputs.proximal_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w_N = sequence_sum(gap_N, inputs.sequence_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    above_N, below_N = (kernel.k * log_w_N + kernel.lam * -torch.expm1(log_w_N) for kernel in bounds.kernels)
    factor_N = torch.where(advantages_N >= 0, above_N, below_N).exp()
    return Surrogate(-factor_N * advantages_N * logp_N, _none(logp_N), _none(logp_N))


def _dppo_tv(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    p_N, q_N = (x_N.clamp(max=0.0).exp() for x_N in (logp_N.detach(), promoted(inputs.behaviour_logp_N)))
    return _within_region((p_N - q_N).abs(), logp_N, inputs, bounds)


def _dppo_kl(logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    log_p_N, log_q_N = (x_N.clamp(max=0.0) for x_N in (logp_N.detach(), promoted(inputs.behaviour_logp_N)))
    # expm1: 1 - exp(x) is 0 for the likeliest tokens in fp32. xlogy: 0 log 0 = 0.
    other_p_N, other_q_N = -torch.expm1(log_p_N), -torch.expm1(log_q_N)
    others_N = torch.xlogy(other_q_N, other_q_N) - torch.xlogy(other_q_N, other_p_N)
    return _within_region(log_q_N.exp() * (log_q_N - log_p_N) + others_N, logp_N, inputs, bounds)


def _within_region(divergence_N: Tensor, logp_N: Tensor, inputs: LossInputs, bounds: ClipBounds) -> Surrogate:
    advantages_N = promoted(inputs.advantages_N)
    change_N = logp_N.detach() - inputs.behaviour_logp_N
    too_likely_N = (advantages_N > 0) & (change_N > 0) & (divergence_N > bounds.high)
    too_rare_N = (advantages_N < 0) & (change_N < 0) & (divergence_N > bounds.low)
    ratio_N = capped_exp(logp_N - inputs.proximal_logp_N).detach()
    weight_N = ratio_N.clamp(max=bounds.dual or _LARGEST_DPPO_WEIGHT)
    masked_N = too_likely_N | too_rare_N
    term_N = -torch.where(masked_N, 0.0, weight_N) * advantages_N * logp_N
    return Surrogate(term_N, masked_N, weight_N != ratio_N)


def _reinforce(logp_N: Tensor, inputs: LossInputs, _: ClipBounds) -> Surrogate:
    return Surrogate(-promoted(inputs.advantages_N) * logp_N, _none(logp_N), _none(logp_N))


def _of_sequence(log_ratio_N: Tensor, inputs: LossInputs) -> Tensor:
    """exp of the mean over each token's sequence; the gradient of each flows through its own log-ratio."""
    mean_N = sequence_mean(log_ratio_N.detach(), inputs.sequence_N)
    # In this order: the added term is exactly 0 and carries the gradient.
    return capped_exp(mean_N + (log_ratio_N - log_ratio_N.detach()))


def _clipped(ratio_N: Tensor, bounds: ClipBounds) -> Tensor:
    return torch.clamp(ratio_N, 1.0 - bounds.low, 1.0 + bounds.high)


def _none(like_N: Tensor) -> Tensor:
    return torch.zeros_like(like_N, dtype=torch.bool)


OBJECTIVES: Mapping[Objective, Callable[[Tensor, LossInputs, ClipBounds], Surrogate]] = {
    "clip": _clip,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "reinforce": _reinforce,
}
DUAL_CLIPPED: tuple[Objective, ...] = ("clip", "gspo", "dppo_tv", "dppo_kl")
"""Objectives that use `ClipBounds.dual`."""
