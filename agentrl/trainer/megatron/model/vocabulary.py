"""Logprobs and entropies where every tensor rank holds V tokens of the vocabulary. N tokens, D width."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group, get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from agentrl.losses import LEAST_LOGP, Targets, TokenOutputs, joined_outputs, without_cut

_MAX_LOGITS = 2**24
"""Logits held at once on a rank (64 MB in fp32)."""


class Head(NamedTuple):
    """This rank's rows of the layer over the vocabulary. vocab: its tokens; rows beyond are padding."""

    weight_VD: Tensor
    vocab: int


def parallel_logprobs(
    hidden_ND: Tensor,
    head: Head,
    targets: Targets,
    *,
    max_logits: int = _MAX_LOGITS,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """The result of `agentrl.losses.logprobs_and_entropy`, from this rank's rows of the head.

    All tensor ranks call it with the same tokens. The head processes them in chunks; more than one chunk are
    recomputed in the backward pass.
    hidden_ND: its gradient is only this rank's share; the caller sums the shares.
    """

    def score(hidden: Tensor, part: Targets) -> TokenOutputs:
        return _score(hidden, head, part, entropy_gradient)

    chunk = max(max_logits // len(head.weight_VD), 1)
    if len(targets.ids_N) <= chunk:
        return score(hidden_ND, targets)
    parts = [
        _checkpointed(score, hidden, part)
        for hidden, part in zip(hidden_ND.split(chunk), targets.split(chunk), strict=True)
    ]
    return joined_outputs(parts)


def _checkpointed(
    score: Callable[[Tensor, Targets], TokenOutputs], hidden: Tensor, part: Targets
) -> TokenOutputs:
    outputs: TokenOutputs = checkpoint(score, hidden, part, use_reentrant=False)
    return outputs


def _score(hidden_ND: Tensor, head: Head, targets: Targets, entropy_gradient: bool) -> TokenOutputs:
    targets_N, temperature_N, kept_N = targets
    weight_VD, vocab = head
    logits_NV = linear(hidden_ND, weight_VD)
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    logits_NV = logits_NV.to(precise) / temperature_N.to(precise)[:, None]
    first = get_tensor_model_parallel_rank() * len(weight_VD)
    num_tokens = min(len(weight_VD), vocab - first)
    logits_NV = without_cut(logits_NV[:, :num_tokens], kept_N, first)
    shifted_NV = logits_NV - _largest(logits_NV)[:, None]
    exp_NV = shifted_NV.exp()
    total_N = reduce_from_tensor_model_parallel_region(exp_NV.sum(-1))
    local_N = targets_N - first
    is_local_N = (local_N >= 0) & (local_N < num_tokens)
    gathered_N = shifted_NV.gather(1, local_N.clamp(0, num_tokens - 1)[:, None])[:, 0]
    target_N = reduce_from_tensor_model_parallel_region(torch.where(is_local_N, gathered_N, 0.0))
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A forbidden token has a logit of -inf; clamped, it adds 0 to the entropy and to the gradient.
        bounded_NV = shifted_NV.clamp(min=LEAST_LOGP)
        mean_N = reduce_from_tensor_model_parallel_region((exp_NV * bounded_NV).sum(-1)) / total_N
        entropy_N = total_N.log() - mean_N
    squares_N = None
    if not torch.is_grad_enabled():
        squares_N = reduce_from_tensor_model_parallel_region(exp_NV.square().sum(-1)) / total_N.square()
    return TokenOutputs(target_N - total_N.log(), entropy_N, sum_pi_squared_N=squares_N)


@torch.no_grad()
def _largest(logits_NV: Tensor) -> Tensor:
    """Each token's largest logit over all ranks; it cancels out, so it needs no gradient."""
    largest_N = logits_NV.amax(-1)
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=get_tensor_model_parallel_group())
    return largest_N
