"""Metrics of the difference between the engine's probabilities and the trainer's."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.corrections import MAX_LOG_RATIO, log_ratios
from agentrl.algorithms.rewards import kl_estimate
from agentrl.algorithms.tokens import Tokens, TokenScores


def mismatch_metrics(tokens: Tokens, scores: TokenScores) -> dict[str, float]:
    """The difference between the engine's logprobs and the old ones, over all trainable tokens.

    With d = rollout logprob - old logprob and ratio = exp(-d), d clipped to -20 .. 20 where exponentiated:

        train_rollout_logprob_abs_diff   mean of |d|, in nats
        train_rollout_kl                 mean of d: k1 of KL(engine, trainer), in nats
        train_rollout_kl_k3              mean of ratio - 1 + d: k3 of the same, never below 0
        train_rollout_ppl_ratio          mean over episodes of exp(mean of d): the trainer's perplexity over
                                         the engine's
        train_rollout_ess                (sum of ratios)^2 / (N x sum of squared ratios): the effective share
                                         of tokens, were they weighted by their ratios
        train_rollout_max_ratio          the largest ratio

    Without a difference, and without tokens, they are 0, 0, 0, 1, 1, 1.

    Source: the estimates of KL as in `kl_estimate`; effective sample size: A. Kong, A Note on Importance
    Sampling using Standardized Weights (1992).
    """
    difference_N = -log_ratios(scores)
    bounded_N = np.clip(difference_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero_N = np.zeros_like(bounded_N)
    ratio_N = np.exp(-bounded_N)
    counts_E = np.bincount(tokens.rollout_index_N, minlength=len(tokens.rollout_ids))
    sums_E = np.bincount(tokens.rollout_index_N, weights=difference_N, minlength=len(tokens.rollout_ids))
    means_E = np.clip(sums_E[counts_E > 0] / counts_E[counts_E > 0], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    squares = len(tokens) * float(np.sum(ratio_N**2))
    return {
        "train_rollout_logprob_abs_diff": tokens.mean(np.abs(difference_N)),
        "train_rollout_kl": tokens.mean(difference_N),
        "train_rollout_kl_k3": tokens.mean(kl_estimate(bounded_N, zero_N, "k3")),
        "train_rollout_ppl_ratio": float(np.exp(means_E).mean()) if len(means_E) else 1.0,
        "train_rollout_ess": float(np.sum(ratio_N)) ** 2 / squares if squares else 1.0,
        "train_rollout_max_ratio": float(ratio_N.max()) if len(tokens) else 1.0,
    }
