"""Metrics of the difference between the engine's probabilities (behaviour) and the trainer's (proximal)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.corrections import MAX_LOG_RATIO, log_ratios
from agentrl.algorithms.rewards import kl_estimate
from agentrl.algorithms.tokens import Floats, Tokens, TokenScores

DEPTHS = (0, 1024, 4096, 16384, 65536)


def mismatch_metrics(tokens: Tokens, scores: TokenScores) -> dict[str, float]:
    """The difference between behaviour and proximal logprobs, over all trainable tokens.

    With d = behaviour - proximal logprob and ratio = exp(-d), d clipped to -20 .. 20 where exponentiated:

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
    bounded_N = _bounded(difference_N)
    counts_E = np.bincount(tokens.rollout_index_N, minlength=len(tokens.rollout_ids))
    sums_E = np.bincount(tokens.rollout_index_N, weights=difference_N, minlength=len(tokens.rollout_ids))
    means_E = _bounded(sums_E[counts_E > 0] / counts_E[counts_E > 0])
    return {
        "train_rollout_logprob_abs_diff": tokens.mean(np.abs(difference_N)),
        "train_rollout_kl": tokens.mean(difference_N),
        "train_rollout_kl_k3": _k3(bounded_N),
        "train_rollout_ppl_ratio": float(np.exp(means_E).mean()) if len(means_E) else 1.0,
        "train_rollout_ess": _effective_share(np.exp(-bounded_N)),
        "train_rollout_max_ratio": float(np.exp(-bounded_N).max()) if len(tokens) else 1.0,
    }


def mismatch_by_staleness(
    tokens: Tokens,
    scores: TokenScores | None,
    clipped_N: npt.NDArray[np.bool_] | None = None,
    *,
    max_staleness: int,
) -> dict[str, float]:
    """The same difference by staleness: how many versions older than the served weights tokens are.

    BIN is a number of versions; the last one is what is older than `max_staleness`, such as `3+` where that
    is 2. Bins without a token are left out.

        staleness_BIN/share      its share of the trainable tokens
        staleness_BIN/k3         k3 of KL(behaviour, proximal) in nats, see `mismatch_metrics`
        staleness_BIN/ess        effective share of its tokens, were they weighted by their ratios
        staleness_BIN/clipfrac   share of its tokens whose ratio was beyond a bound of the correction

    scores: None = proximal logprobs were not computed. clipped_N: None = no correction has bounds on tokens.
    """
    last, metrics = max_staleness + 1, {}
    bin_N = np.minimum(tokens.staleness_N, last)
    for number in np.unique(bin_N).tolist():
        is_member_N = bin_N == number
        name = f"staleness_{number}{'+' if number == last else ''}"
        metrics[f"{name}/share"] = tokens.mean(is_member_N.astype(np.float64))
        if scores is not None:
            bounded_n = _bounded(-log_ratios(scores)[is_member_N])
            metrics |= {f"{name}/k3": _k3(bounded_n), f"{name}/ess": _effective_share(np.exp(-bounded_n))}
        if clipped_N is not None:
            metrics[f"{name}/clipfrac"] = float(clipped_N[is_member_N].mean())
    return metrics


def mismatch_by_depth(tokens: Tokens, scores: TokenScores) -> dict[str, float]:
    """The same difference by depth: how many tokens stand before a token.

        depth_TOKENS/k3     k3 of KL(behaviour, proximal) in nats, of tokens with at least so many before
                            them, and fewer than the next larger number of `DEPTHS`

    Depths without a token are left out, and all where no token is deeper than the first.
    """
    depth_N = tokens.gather([np.arange(len(s), dtype=np.float32) for s in tokens.samples], "depths")
    bin_N = np.searchsorted(DEPTHS, depth_N, side="right") - 1
    numbers = np.unique(bin_N).tolist()
    if not any(numbers):
        return {}
    bounded_N = _bounded(-log_ratios(scores))
    return {f"depth_{DEPTHS[number]}/k3": _k3(bounded_N[bin_N == number]) for number in numbers}


def _bounded(difference_N: Floats) -> Floats:
    return np.clip(difference_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(bounded_N: Floats) -> float:
    estimate_N = kl_estimate(bounded_N, np.zeros_like(bounded_N), "k3")
    return float(estimate_N.mean()) if len(estimate_N) else 0.0


def _effective_share(ratio_N: Floats) -> float:
    squares = len(ratio_N) * float(np.sum(ratio_N**2))
    return float(np.sum(ratio_N)) ** 2 / squares if squares else 1.0
