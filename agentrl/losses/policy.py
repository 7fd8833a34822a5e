"""The policy-gradient losses: clipped (PPO), sequence ratios (GSPO), clipped weights (CISPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from agentrl.losses.base import LossInputs, LossOutput, TokenOutputs, promoted
from agentrl.losses.kl import KlTerm, capped_exp
from agentrl.losses.sequences import sequence_mean

Objective = Literal["clip", "gspo", "cispo"]


class _Surrogate(NamedTuple):
    """Terms to minimise, [N], and the tokens where the clip or the dual clip applies."""

    term_N: Tensor
    clipped_N: Tensor
    dual_clipped_N: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy-gradient `Loss`: policy term - entropy_coef x entropy + kl.coef x kl, per token.

    Objectives, where A is the advantage and clip(x) = min(max(x, 1 - eps_clip), 1 + eps_clip_high):

        clip    max(-A r, -A clip(r))               r = exp(logp - proximal_logp)
        gspo    max(-A s, -A clip(s))               s = exp(mean over the sequence of logp - proximal_logp)
        cispo   -stop_gradient(clip(r)) x A x logp

    - clip: https://arxiv.org/abs/1707.06347, equation 7. eps_clip_high of its own (clip-higher):
      https://arxiv.org/abs/2503.14476.
    - gspo: https://arxiv.org/abs/2507.18071, in its token form (GSPO-token): all tokens of a
      sequence have the value s, and the gradient of each flows through its own logp. Where a sequence
      has one advantage and one weight, that is the gradient of the plain form; where they differ
      (turn-level credit, corrections), each token has its own. The mean is over the loss tokens of one
      Sample. The paper's bounds are 3e-4 and 4e-4.
    - cispo: https://arxiv.org/abs/2506.13585. Usual are eps_clip = 1 (no bound below) and a high
      bound of several.
    - eps_clip_c (dual clip): where A < 0 the term is at most -eps_clip_c x A, so that the gradient of a
      token that became far likelier is bounded: https://arxiv.org/abs/1912.09729, equation 5.
    - opsm_delta (nats per token; off-policy sequence masking, https://arxiv.org/abs/2512.02556,
      section 3.1): the policy term of a token is 0 where A < 0 and the mean of behaviour_logp - logp
      over its sequence is above opsm_delta. As in the paper the engine's own logprobs are used, and
      entropy and KL do not change. Nor do the weights: those of other tokens do not grow.

    Log-ratios are capped at 20, so that a token that became e^20 times likelier makes neither the sum
    nor its gradient infinite; no gradient flows through a ratio beyond the cap.

    Metrics, as token means: pg_loss (policy term), pg_clipfrac (tokens whose clipped branch is
    chosen and differs; cispo: whose ratio was clipped), ppo_kl (proximal - current, the k1 estimate of
    KL(old, new)), entropy_loss (nats), train_rollout_logprob_abs_diff (trainer now against engine
    then), and where they apply pg_dual_clipfrac, opsm_fraction (tokens dropped), kl_loss (nats).

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

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ValueError(f"objective must be clip, gspo or cispo, got {self.objective!r}")
        for name, bound in (("eps_clip", self.eps_clip), ("eps_clip_high", self.eps_clip_high)):
            if not 0.0 < bound < math.inf:
                raise ValueError(f"{name} must be above 0, got {bound}")
        if self.eps_clip_c is not None and not 1.0 < self.eps_clip_c < math.inf:
            raise ValueError(f"eps_clip_c must be above 1, got {self.eps_clip_c}")
        if self.eps_clip_c is not None and self.objective == "cispo":
            raise ValueError("cispo has bounded weights already; leave out eps_clip_c")
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
        surrogate = self._surrogate(logp_N, inputs)
        dropped_N = self._dropped(logp_N, inputs)
        policy_N = torch.where(dropped_N, 0.0, surrogate.term_N)
        term_N = policy_N
        if self.entropy_coef:
            if logp_N.requires_grad and not entropy_N.requires_grad:
                raise ValueError("an entropy bonus needs logprobs_and_entropy(..., entropy_gradient=True)")
            term_N = term_N - self.entropy_coef * entropy_N
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
            metrics["opsm_fraction"] = dropped_N.sum()
        if self.kl is not None:
            if inputs.ref_logp_N is None:
                raise ValueError("a KL penalty needs ref_logp_N: score the batch with a reference model")
            kl_N = self.kl.estimate(logp_N, inputs.ref_logp_N, inputs.proximal_logp_N)
            term_N = term_N + self.kl.coef * kl_N
            metrics["kl_loss"] = kl_N.sum()
        detached = {name: metric.detach() for name, metric in metrics.items()}
        return LossOutput((inputs.weights_N * term_N).sum(), detached)

    def _surrogate(self, logp_N: Tensor, inputs: LossInputs) -> _Surrogate:
        ratio_N = self._ratio(logp_N, inputs)
        clipped_N = torch.clamp(ratio_N, 1.0 - self.eps_clip, 1.0 + self.eps_clip_high)
        advantages_N = promoted(inputs.advantages_N)
        if self.objective == "cispo":
            term_N = -clipped_N.detach() * advantages_N * logp_N
            return _Surrogate(term_N, clipped_N != ratio_N, torch.zeros_like(clipped_N, dtype=torch.bool))
        plain_N, pessimistic_N = -advantages_N * ratio_N, -advantages_N * clipped_N
        term_N = torch.maximum(plain_N, pessimistic_N)
        if self.eps_clip_c is None:
            dual_N = torch.zeros_like(term_N, dtype=torch.bool)
        else:
            ceiling_N = -self.eps_clip_c * advantages_N
            dual_N = (advantages_N < 0) & (term_N > ceiling_N)
            term_N = torch.where(dual_N, ceiling_N, term_N)
        return _Surrogate(term_N, pessimistic_N > plain_N, dual_N)

    def _ratio(self, logp_N: Tensor, inputs: LossInputs) -> Tensor:
        log_ratio_N = logp_N - inputs.proximal_logp_N
        if self.objective == "gspo":
            mean_N = sequence_mean(log_ratio_N.detach(), inputs.sequence_N)
            # In this order: the added term is exactly 0 and carries the gradient.
            log_ratio_N = mean_N + (logp_N - logp_N.detach())
        return capped_exp(log_ratio_N)

    def _dropped(self, logp_N: Tensor, inputs: LossInputs) -> Tensor:
        if self.opsm_delta is None:
            return torch.zeros_like(logp_N, dtype=torch.bool)
        gap_N = sequence_mean(inputs.behaviour_logp_N - logp_N.detach(), inputs.sequence_N)
        return (inputs.advantages_N < 0) & (gap_N > self.opsm_delta)
