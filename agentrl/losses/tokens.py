"""Logprobs of given tokens, without the logits of all of them in memory. N tokens, D width, V vocab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from agentrl.losses.base import TokenOutputs
from agentrl.losses.gpu import fused, to_device
from agentrl.types import Extra

MAX_LOGITS_OF_CPU = 2**24
"""Logits held at once on a CPU (64 MB in fp32)."""
_BYTES_A_LOGIT = 128
"""A GPU's memory, for each logit that is held at once (bytes): in half precision all of them take 1/64 of it,
and so do their gradients."""
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


class LogitFinish(NamedTuple):
    """What some families do to the logits of their head: x -> softcap tanh(scale x / softcap).

    scale: e.g. Cohere, Granite. softcap: Gemma 2 (Gemma Team, 2024, arXiv:2408.00118); None = no cap.
    """

    scale: float = 1.0
    softcap: float | None = None


class OutputHead(NamedTuple):
    """The layer over the vocabulary, or the rows of it that one of several ranks holds.

    first: the token id of the first row. vocab: the ids of all ranks together; rows beyond are padding.
    None = every row is an id.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    first: int = 0
    vocab: int | None = None
    finish: LogitFinish = LogitFinish()


class HeadRanks(NamedTuple):
    """Reductions over the ranks that share a vocabulary. Both take [..., N] and may overwrite it."""

    largest: Callable[[Tensor], Tensor]
    total: Callable[[Tensor], Tensor]


def logprobs_and_entropy(
    hidden_ND: Tensor,
    head: OutputHead,
    targets: Targets,
    *,
    ranks: HeadRanks | None = None,
    max_logits: int | None = None,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """Score N targets under softmax(head(hidden) / temperature), in fp32 or better.

    The logits of a chunk of tokens are computed, reduced to a few numbers a token and dropped; the backward
    pass computes them again. A token's hidden state is the one that predicts it: the state of the token
    before. Where a target has kept ids, logprob, entropy and sum of squares are of the distribution
    renormalised over them ("Keep Sampling Mask", DeepSeek-AI, 2025, arXiv:2512.02556).

    ranks: those that share the vocabulary; all call it with the same tokens, and the gradient of hidden_ND is
    this rank's share: the caller sums the shares. max_logits: of a chunk (count); None = `max_logits_of`.
    entropy_gradient: the entropy (nats) carries a gradient, too, for an entropy bonus.
    """
    weight_VD, bias_V = head.weight_VD, head.bias_V
    if head.finish.scale != 1.0:
        hidden_ND = hidden_ND * head.finish.scale
        bias_V = None if bias_V is None else bias_V * head.finish.scale
    if bias_V is not None:
        # A bias is the weight of one more channel, which is always 1.
        hidden_ND = torch.cat([hidden_ND, hidden_ND.new_ones(len(hidden_ND), 1)], 1)
        weight_VD = torch.cat([weight_VD, bias_V[:, None]], 1)
    rows = len(weight_VD) if head.vocab is None else min(len(weight_VD), head.vocab - head.first)
    if rows < len(weight_VD):
        weight_VD = weight_VD[:rows]
    learns = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    chunk = max((max_logits or max_logits_of(weight_VD.device)) // rows, 1)
    job = _Job(
        *(targets, head.first, rows, head.finish.softcap, chunk, ranks),
        entropy_gradient=entropy_gradient and learns,
        learns=torch.is_grad_enabled(),
    )
    logp_N, entropy_N, squares_N = _scored(hidden_ND, weight_VD, job)
    return TokenOutputs(logp_N, entropy_N, sum_pi_squared_N=None if torch.is_grad_enabled() else squares_N)


def max_logits_of(device: torch.device) -> int:
    """The logits that are held at once on a device (count).

    It depends on nothing that changes while a run lasts: other chunks would sum in another order.
    """
    if device.type != "cuda":
        return MAX_LOGITS_OF_CPU
    return max_logits_on(int(torch.cuda.get_device_properties(device).total_memory))


def max_logits_on(gpu_bytes: int) -> int:
    """The logits that are held at once on a GPU with so much memory (count)."""
    return gpu_bytes // _BYTES_A_LOGIT


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
    at = to_device(np.stack([rows[is_here], columns[is_here]]), logits_NV.device)
    is_cut_NV = to_device(counts > 0, logits_NV.device)[:, None].repeat(1, logits_NV.shape[1])
    is_cut_NV[at[0], at[1]] = False
    return logits_NV.masked_fill(is_cut_NV, -torch.inf)


class _Job(NamedTuple):
    """What is computed of the logits, and how. rows: of the head on this rank (ids first to first + rows)."""

    targets: Targets
    first: int
    rows: int
    softcap: float | None
    chunk: int
    ranks: HeadRanks | None
    entropy_gradient: bool
    learns: bool

    def parts(self) -> Iterator[slice]:
        """The tokens, a chunk at a time."""
        number = len(self.targets.ids_N)
        return (slice(start, min(start + self.chunk, number)) for start in range(0, number, self.chunk))

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor, part: slice) -> Tensor:
        kept_N = self.targets.kept_N
        if kept_N is not None:
            kept_N = kept_N.take(np.arange(part.start, part.stop))
        logits_NV = linear(hidden_ND[part], weight_VD)
        if self.softcap is not None:
            logits_NV = logits_NV.div_(self.softcap).tanh_().mul_(self.softcap)
        return without_cut(logits_NV, kept_N, self.first)

    def slope(self, logits_NV: Tensor) -> Tensor | None:
        """The derivative of the cap at these logits, which are capped; None = there is no cap."""
        if self.softcap is None:
            return None
        # A cut left out what is -inf: its gradient is 0, whatever the slope.
        return 1.0 - (logits_NV / self.softcap).clamp_(min=-1.0).square_()

    def columns(self) -> tuple[Tensor, Tensor]:
        """Each target's column on this rank, and whether it has one; else any column."""
        columns_N = self.targets.ids_N - self.first
        is_here_N = (columns_N >= 0) & (columns_N < self.rows)
        return columns_N.clamp(0, self.rows - 1), is_here_N


class _Context(Protocol):
    """What torch passes from a forward pass to its backward pass."""

    job: _Job
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """These become `saved_tensors`."""

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """No gradient flows through these."""


class _Logprobs(torch.autograd.Function):
    """Logprobs, entropies and sums of squared probabilities, [N] each, of a `_Job`."""

    @staticmethod
    def forward(
        ctx: _Context, hidden_ND: Tensor, weight_VD: Tensor, job: _Job
    ) -> tuple[Tensor, Tensor, Tensor]:
        precise = torch.promote_types(hidden_ND.dtype, torch.float32)
        temperature_N = job.targets.temperature_N.to(precise)
        columns_N, is_here_N = job.columns()
        sums_5N = hidden_ND.new_empty((5, len(hidden_ND)), dtype=precise)
        for part in job.parts():
            logits_NV = job.logits(hidden_ND, weight_VD, part)
            sums_5N[:, part] = _sums(logits_NV, temperature_N[part], columns_N[part], not job.learns)
            del logits_NV
        largest_N, total_N, mean_N, squares_N, target_N = sums_5N
        target_N = torch.where(is_here_N, target_N, 0.0)
        if job.ranks is not None:
            own_N, largest_N = largest_N, job.ranks.largest(largest_N.clone())
            factor_N = (own_N - largest_N).exp()
            mean_N = factor_N * (mean_N + total_N * (own_N - largest_N))
            parts_4N = torch.stack([factor_N * total_N, mean_N, factor_N.square() * squares_N, target_N])
            total_N, mean_N, squares_N, target_N = job.ranks.total(parts_4N)
        entropy_N = total_N.log() - mean_N / total_N
        normaliser_N = largest_N + total_N.log()
        ctx.save_for_backward(
            *(hidden_ND, weight_VD, temperature_N, columns_N, is_here_N, normaliser_N, entropy_N)
        )
        ctx.job = job
        logp_N = target_N - normaliser_N
        squares_N = squares_N / total_N.square()
        ctx.mark_non_differentiable(*(() if job.entropy_gradient else (entropy_N,)), squares_N)
        return logp_N, entropy_N, squares_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, d_logp_N: Tensor, d_entropy_N: Tensor, _d_squares_N: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_ND, weight_VD, *rest = ctx.saved_tensors
        job = ctx.job
        needs_hidden, needs_weight, _needs_job = ctx.needs_input_grad
        temperature_N, columns_N, is_here_N, normaliser_N, entropy_N = rest
        numbers = [temperature_N, normaliser_N, d_logp_N, torch.where(is_here_N, d_logp_N, 0.0)]
        if job.entropy_gradient:
            numbers += [entropy_N, d_entropy_N]
        numbers_NK = torch.stack(numbers, 1)
        d_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        d_weight_VD: Tensor | None = None
        for part in job.parts():
            logits_NV = job.logits(hidden_ND, weight_VD, part)
            slope_NV = job.slope(logits_NV)
            d_logits_NV = _gradient(logits_NV, columns_N[part], numbers_NK[part])
            if slope_NV is not None:
                d_logits_NV.mul_(slope_NV)
            del logits_NV, slope_NV
            if d_hidden_ND is not None:
                torch.mm(d_logits_NV, weight_VD, out=d_hidden_ND[part])
            if needs_weight:
                share_VD = d_logits_NV.t() @ hidden_ND[part]
                # Sums of many chunks would lose digits in half precision.
                d_weight_VD = _promoted(share_VD, job) if d_weight_VD is None else d_weight_VD.add_(share_VD)
            del d_logits_NV
        if needs_weight and d_weight_VD is None:
            d_weight_VD = torch.zeros_like(weight_VD)
        return d_hidden_ND, None if d_weight_VD is None else d_weight_VD.to(weight_VD.dtype), None


_scored: Callable[[Tensor, Tensor, _Job], tuple[Tensor, Tensor, Tensor]] = _Logprobs.apply


def _promoted(share_VD: Tensor, job: _Job) -> Tensor:
    is_whole = len(job.targets.ids_N) <= job.chunk
    return share_VD if is_whole else share_VD.to(torch.promote_types(share_VD.dtype, torch.float32))


@fused
def _sums(logits_NV: Tensor, temperature_N: Tensor, columns_N: Tensor, has_squares: bool) -> Tensor:
    """[5, N] of the scaled logits z: m = max z, the sums of exp(z - m), (z - m) exp(z - m), exp(z - m)^2, and
    the target's z. Overwrites the logits, if they are precise.
    """
    scaled_NV = logits_NV.to(temperature_N.dtype).div_(temperature_N[:, None])
    target_N = scaled_NV.gather(1, columns_N[:, None])[:, 0]
    shifted_NV = scaled_NV.clamp_(min=LEAST_LOGP)
    largest_N = shifted_NV.amax(-1)
    shifted_NV.sub_(largest_N[:, None])
    exp_NV = shifted_NV.exp()
    total_N = exp_NV.sum(-1)
    mean_N = shifted_NV.mul_(exp_NV).sum(-1)
    squares_N = exp_NV.square_().sum(-1) if has_squares else total_N
    return torch.stack([largest_N, total_N, mean_N, squares_N, target_N])


@fused
def _gradient(logits_NV: Tensor, columns_N: Tensor, numbers_NK: Tensor) -> Tensor:
    """The gradient of the logits, in their dtype; overwrites them, if they are precise.

    d_logp (1[target] - p) - d_entropy p (log p + entropy), all over the temperature. K: temperature,
    normaliser, d_logp, the same where the target is here, else 0; then perhaps entropy and d_entropy.
    """
    temperature_N1, normaliser_N1, d_logp_N1, d_target_N1, *entropy = numbers_NK.split(1, 1)
    scaled_NV = logits_NV.to(numbers_NK.dtype).div_(temperature_N1).clamp_(min=LEAST_LOGP)
    logp_NV = scaled_NV.sub_(normaliser_N1)
    pi_NV = logp_NV.exp()
    if entropy:
        entropy_N1, d_entropy_N1 = entropy
        pull_NV = logp_NV.add_(entropy_N1).mul_(d_entropy_N1).add_(d_logp_N1)
    else:
        pull_NV = d_logp_N1
    d_NV = pi_NV.mul_(pull_NV).neg_().div_(temperature_N1)
    at_N1 = d_NV.gather(1, columns_N[:, None]) + d_target_N1 / temperature_N1
    # Rounded after the sum: near p = 1 the difference of two rounded numbers would be noise.
    return d_NV.to(logits_NV.dtype).scatter_(1, columns_N[:, None], at_N1.to(logits_NV.dtype))
