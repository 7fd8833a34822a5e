"""The clipped policy-gradient loss. No KL penalty, no entropy bonus, no dual clip."""

from __future__ import annotations

import torch

from agentrl.losses.base import LossInputs, LossOutput, TokenOutputs

_MAX_LOG_RATIO = 20.0


def policy_loss(
    outputs: TokenOutputs, inputs: LossInputs, *, eps_clip: float = 0.2, eps_clip_high: float = 0.28
) -> LossOutput:
    """PPO's clipped surrogate with bounds of their own on both sides (clip-higher).

    ratio = exp(logp - old_logp)
    term  = max(-advantage x ratio, -advantage x clip(ratio, 1 - eps_clip, 1 + eps_clip_high))

    Clipping: https://arxiv.org/abs/1707.06347, equation 7. Clip-higher:
    https://arxiv.org/abs/2503.14476. The log-ratio is capped at 20, so that no token that
    became e^20 times likelier can turn the sum into infinity.

    Metrics, as token means: pg_loss (term), pg_clipfrac (tokens whose clipped branch is
    chosen and differs), ppo_kl (old_logp - logp, the k1 estimate of KL(old, new)),
    entropy_loss (nats), train_rollout_logprob_abs_diff (trainer now against engine then).
    """
    log_ratio_N = outputs.logp_N - inputs.old_logp_N
    ratio_N = torch.exp(torch.clamp(log_ratio_N, max=_MAX_LOG_RATIO))
    clipped_N = torch.clamp(ratio_N, 1.0 - eps_clip, 1.0 + eps_clip_high)
    plain_N = -inputs.advantages_N * ratio_N
    pessimistic_N = -inputs.advantages_N * clipped_N
    term_N = torch.maximum(plain_N, pessimistic_N)
    loss = (inputs.weights_N * term_N).sum()
    with torch.no_grad():
        metrics = {
            "pg_loss": term_N.sum(),
            "pg_clipfrac": (pessimistic_N > plain_N).sum(),
            "ppo_kl": -log_ratio_N.sum(),
            "entropy_loss": outputs.entropy_N.sum(),
            "train_rollout_logprob_abs_diff": (outputs.logp_N - inputs.rollout_logp_N).abs().sum(),
        }
    return LossOutput(loss, metrics)
