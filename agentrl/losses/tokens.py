"""Logprobs of given tokens, without the logits of all of them in memory. N tokens, D width, V vocab."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.losses.base import TokenOutputs

_MAX_LOGITS = 2**24
"""Logits held at once (64 MB in fp32), by default."""


def logprobs_and_entropy(
    hidden_ND: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature_N: Tensor,
    *,
    max_logits: int = _MAX_LOGITS,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """Score `targets_N` under softmax(lm_head(hidden) / temperature), in fp32 or better.

    The head processes tokens in chunks of at most `max_logits` logits; more than one chunk are recomputed
    in the backward pass instead of being stored. A token's hidden state is the one that predicts it: the
    state of the token before.
    entropy_gradient: the entropy (nats) carries a gradient, too, for an entropy bonus; the backward pass
    then needs more memory for each chunk.
    """
    width = _vocabulary(lm_head, hidden_ND)
    chunk = max(max_logits // width, 1)
    if len(targets_N) <= chunk:
        return _score(hidden_ND, lm_head, targets_N, temperature_N, entropy_gradient)
    parts = [
        checkpoint(_score, hidden, lm_head, targets, temperature, entropy_gradient, use_reentrant=False)
        for hidden, targets, temperature in zip(
            hidden_ND.split(chunk), targets_N.split(chunk), temperature_N.split(chunk), strict=True
        )
    ]
    return joined_outputs(parts)


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
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy_gradient: bool,
) -> TokenOutputs:
    logits_NV = lm_head(hidden_ND)
    # Half precision is enough for a matrix product, never for a softmax.
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    logp_NV = torch.log_softmax(logits_NV.to(precise) / temperature_N.to(precise)[:, None], dim=-1)
    logp_N = logp_NV.gather(1, targets_N[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A forbidden token has logp -inf; clamped, it adds 0 to the entropy and to the gradient.
        bounded_NV = logp_NV.clamp(min=torch.finfo(logp_NV.dtype).min)
        pi_NV = logp_NV.exp()
        entropy_N = -(pi_NV * bounded_NV).sum(-1)
    squares_N = None if torch.is_grad_enabled() else pi_NV.square().sum(-1)
    return TokenOutputs(logp_N, entropy_N, sum_pi_squared_N=squares_N)
