"""The policy-gradient loss: an objective's term, an entropy bonus and a KL penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.losses.base import LossInputs, LossOutput, TokenOutputs, promoted
from agentrl.losses.kl import KlTerm
from agentrl.losses.objectives import DUAL_CLIPPED, KERNELS, OBJECTIVES, ClipBounds, LossKernel, Objective
from agentrl.losses.sequences import sequence_mean


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy-gradient `Loss`: policy term - entropy_coef x entropy + kl.coef x kl, per token.

    objective: the policy term, one of `agentrl.losses.objectives`; eps_clip, eps_clip_high, eps_clip_c,
    sapo_tau and vespo are its bounds low, high, dual, tau and kernels.

    adapts_entropy: entropy_coef changes from step to step (`LossInputs.coefficients`).

    opsm_delta (nats per token; off-policy sequence masking, https://arxiv.org/abs/2512.02556, section 3.1):
    the policy term of a token is 0 where A < 0 and the mean of behaviour_logp - logp over its sequence is
    above opsm_delta. As in the paper the engine's own logprobs are used, and entropy and KL do not change.
    Nor do the weights: those of other tokens do not grow.

    Where the inputs have kl_cov_N (KL-Cov, https://arxiv.org/abs/2505.22617), kl_cov_N x what
    |logp - proximal_logp| has above `LossInputs.rounding` is added: it holds these tokens near the
    policy before the update. Below, the sign of the difference is chance, and the penalty would pull at a
    token with the full coefficient that the policy has not moved.

    Metrics, as token means: pg_loss (policy term), pg_clipfrac (clip, gspo: tokens whose clipped branch is
    chosen and differs; others: whose ratio was bounded, or that were masked; sapo, vespo: 0), ppo_kl
    (proximal - current, the k1 estimate of KL(old, new)), entropy_loss (nats), train_rollout_logprob_abs_diff
    (trainer now against engine then), and where they apply pg_dual_clipfrac, opsm_masked (tokens dropped),
    kl_loss (nats), kl_cov_loss (nats).

    Raises:
        ValueError: a bound or a coefficient is out of range, or a combination is invalid.
    """

    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    eps_clip_c: float | None = None
    objective: Objective = "clip"
    entropy_coef: float = 0.0
    kl: KlTerm | None = None
    opsm_delta: float | None = None
    sapo_tau: tuple[float, float] = (1.0, 1.05)
    vespo: tuple[LossKernel, LossKernel] = KERNELS
    adapts_entropy: bool = False

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")
        positive = {
            "eps_clip": self.eps_clip,
            "eps_clip_high": self.eps_clip_high,
            "sapo_tau": min(self.sapo_tau),
            "vespo": min(number for kernel in self.vespo for number in kernel),
        }
        for name, bound in positive.items():
            if not 0.0 < bound < math.inf:
                raise ValueError(f"{name} must be above 0, got {bound}")
        if self.eps_clip_c is not None and not 1.0 < self.eps_clip_c < math.inf:
            raise ValueError(f"eps_clip_c must be above 1, got {self.eps_clip_c}")
        if self.eps_clip_c is not None and self.objective not in DUAL_CLIPPED:
            raise ValueError(f"{self.objective} has no dual clip; leave out eps_clip_c")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"entropy_coef must be finite, got {self.entropy_coef}")
        if self.opsm_delta is not None and not math.isfinite(self.opsm_delta):
            raise ValueError(f"opsm_delta must be finite, got {self.opsm_delta}")

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> LossOutput:
        """The weighted sum and its metrics.

        Raises:
            ValueError: a KL penalty without ref_logp_N, or an entropy bonus whose entropy has no gradient.
        """
        logp_N, entropy_N = promoted(outputs.logp_N), promoted(outputs.entropy_N)
        bounds = ClipBounds(self.eps_clip, self.eps_clip_high, self.eps_clip_c, self.sapo_tau, self.vespo)
        surrogate = OBJECTIVES[self.objective](logp_N, inputs, bounds)
        dropped_N = self._dropped(logp_N, inputs)
        policy_N = torch.where(dropped_N, 0.0, surrogate.term_N)
        term_N = policy_N
        adapted = inputs.coefficients
        entropy_coef = self.entropy_coef if adapted.entropy is None else adapted.entropy
        if entropy_coef:
            if logp_N.requires_grad and not entropy_N.requires_grad:
                raise ValueError("an entropy bonus needs logprobs_and_entropy(..., entropy_gradient=True)")
            term_N = term_N - entropy_coef * entropy_N
        metrics = {
            "pg_loss": policy_N.sum(),
            "pg_clipfrac": surrogate.clipped_N.sum(),
            "ppo_kl": (inputs.proximal_logp_N - logp_N).sum(),
            "entropy_loss": entropy_N.sum(),
            "train_rollout_logprob_abs_diff": (logp_N - inputs.behaviour_logp_N).abs().sum(),
        }
        if self.eps_clip_c is not None:
            metrics["pg_dual_clipfrac"] = surrogate.dual_clipped_N.sum()
        if self.opsm_delta is not None:
            metrics["opsm_masked"] = dropped_N.sum()
        if self.kl is not None:
            if inputs.ref_logp_N is None:
                raise ValueError("a KL penalty needs ref_logp_N: score the batch with a reference model")
            kl_N = self.kl.estimate(logp_N, inputs.ref_logp_N, inputs.proximal_logp_N)
            term_N = term_N + (self.kl.coef if adapted.kl is None else adapted.kl) * kl_N
            metrics["kl_loss"] = kl_N.sum()
        if inputs.kl_cov_N is not None:
            distance_N = (logp_N - inputs.proximal_logp_N).abs()
            held_N = inputs.kl_cov_N * (distance_N - inputs.rounding).clamp(min=0.0)
            term_N = term_N + held_N
            metrics["kl_cov_loss"] = held_N.sum()
        detached = {name: metric.detach() for name, metric in metrics.items()}
        return LossOutput((inputs.weights_N * term_N).sum(), detached)

    def _dropped(self, logp_N: Tensor, inputs: LossInputs) -> Tensor:
        if self.opsm_delta is None:
            return torch.zeros_like(logp_N, dtype=torch.bool)
        gap_N = sequence_mean(inputs.behaviour_logp_N - logp_N.detach(), inputs.sequence_N)
        return (inputs.advantages_N < 0) & (gap_N > self.opsm_delta)
