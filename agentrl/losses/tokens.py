"""Logprobs of given tokens, without the logits of all of them in memory. N tokens, D width, V vocab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.losses.base import TokenOutputs
from agentrl.types import Extra

_MAX_LOGITS = 2**24
"""Logits held at once (64 MB in fp32), by default."""
LEAST_LOGP = -1e30
"""Stands for a logprob of -inf: its product with a probability of 0, or with a gradient, stays a number."""


class Targets(NamedTuple):
    """N tokens to score, and what each was sampled from.

    ids_N: int64. temperature_N: which divides the logits. kept_N: the token ids that a cut kept (`KEPT_IDS`);
    None, or none for a token: the whole vocabulary.
    """

    ids_N: Tensor
    temperature_N: Tensor
    kept_N: Extra | None = None

    def split(self, size: int) -> list[Targets]:
        """At most `size` tokens at a time."""
        kept_N = self.kept_N
        return [
            Targets(ids, temperature, None if kept_N is None else kept_N.take(start + np.arange(len(ids))))
            for ids, temperature, start in zip(
                self.ids_N.split(size),
                self.temperature_N.split(size),
                range(0, len(self.ids_N), size),
                strict=True,
            )
        ]


def logprobs_and_entropy(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets: Targets,
    *,
    max_logits: int = _MAX_LOGITS,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """Score N targets under softmax(lm_head(hidden) / temperature), in fp32 or better.

    The head processes tokens in chunks of at most `max_logits` logits; more than one chunk are recomputed
    in the backward pass instead of being stored. A token's hidden state is the one that predicts it: the
    state of the token before. Where a target has kept ids, logprob, entropy and sum of squares are of the
    distribution renormalised over them ("Keep Sampling Mask", DeepSeek-AI, 2025, arXiv:2512.02556).
    entropy_gradient: the entropy (nats) carries a gradient, too, for an entropy bonus; the backward pass
    then needs more memory for each chunk.
    """
    width = _vocabulary(lm_head, hidden_ND)
    chunk = max(max_logits // width, 1)
    if len(targets.ids_N) <= chunk:
        return _score(hidden_ND, lm_head, targets, entropy_gradient)
    parts = [
        checkpoint(_score, hidden, lm_head, part, entropy_gradient, use_reentrant=False)
        for hidden, part in zip(hidden_ND.split(chunk), targets.split(chunk), strict=True)
    ]
    return joined_outputs(parts)


def without_cut(logits_NV: Tensor, kept_N: Extra | None, first: int = 0) -> Tensor:
    """The logits, with -inf at the ids that a cut excluded; unchanged for tokens without kept ids.

    first: the id of the first column, where these are a part of the vocabulary.
    """
    if kept_N is None or kept_N.offsets is None or not len(kept_N.values):
        return logits_NV
    counts = np.diff(kept_N.offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = kept_N.values.astype(np.int64) - first
    is_here = (columns >= 0) & (columns < logits_NV.shape[1])
    at = torch.from_numpy(np.stack([rows[is_here], columns[is_here]])).to(logits_NV.device)
    is_cut_NV = torch.from_numpy(counts > 0).to(logits_NV.device)[:, None].repeat(1, logits_NV.shape[1])
    is_cut_NV[at[0], at[1]] = False
    return logits_NV.masked_fill(is_cut_NV, -torch.inf)


def joined_outputs(parts: Sequence[TokenOutputs]) -> TokenOutputs:
    """The outputs of chunks of tokens, one after the other."""
    squares = [part.sum_pi_squared_N for part in parts if part.sum_pi_squared_N is not None]
    return TokenOutputs(
        torch.cat([part.logp_N for part in parts]),
        torch.cat([part.entropy_N for part in parts]),
        sum_pi_squared_N=torch.cat(squares) if squares else None,
    )


def _vocabulary(lm_head: Callable[[Tensor], Tensor], hidden_ND: Tensor) -> int:
    with torch.no_grad():
        return int(lm_head(hidden_ND[:1]).shape[-1])


def _score(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets: Targets,
    entropy_gradient: bool,
) -> TokenOutputs:
    logits_NV = lm_head(hidden_ND)
    # Half precision is enough for a matrix product, never for a softmax.
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    scaled_NV = logits_NV.to(precise) / targets.temperature_N.to(precise)[:, None]
    logp_NV = torch.log_softmax(without_cut(scaled_NV, targets.kept_N), dim=-1)
    logp_N = logp_NV.gather(1, targets.ids_N[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A forbidden token has logp -inf; clamped, it adds 0 to the entropy and to the gradient.
        bounded_NV = logp_NV.clamp(min=LEAST_LOGP)
        pi_NV = logp_NV.exp()
        entropy_N = -(pi_NV * bounded_NV).sum(-1)
    squares_N = None if torch.is_grad_enabled() else pi_NV.square().sum(-1)
    return TokenOutputs(logp_N, entropy_N, sum_pi_squared_N=squares_N)
