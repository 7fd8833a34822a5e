"""From logits to tokens, for all rows at once.

One uniform number per token, hashed from (seed, index of the token in its completion), picks by
the inverse of the cumulative distribution. So a seed reproduces a completion whatever else is in
the batch, and a row needs one random number instead of one per token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from agentrl.types import IntArray

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK = 128
_ONE_BLOCK = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """How each of B rows is sampled.

    seeds: uint64. indices: uint64, tokens sampled so far. keeps: whether the ids that a cut kept are asked
    for; such a row cuts, and is not greedy.
    """

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.uint64]
    indices: npt.NDArray[np.uint64]
    keeps: npt.NDArray[np.bool_]


class Sampled(NamedTuple):
    """Tokens [B] and their logprobs [B]. kept: by row, the ids that its cut kept, in order (int32)."""

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    kept: Mapping[int, IntArray]


def sample(logits_BV: Tensor, rules: Rules) -> Sampled:
    """A token for each row, and its logprob after temperature and before top-p and top-k.

    Where the kept ids are asked for, the logprob is that of the distribution renormalised over them.
    Temperature 0 takes the likeliest token; its logprob is that of temperature 1. The logits are
    overwritten: a second array of that size costs more, page by page, than the softmax itself.
    """
    greedy = rules.temperature == 0
    divisor = np.where(greedy, np.float32(1), rules.temperature)
    if np.any(divisor != 1):
        logits_BV.div_(torch.from_numpy(divisor)[:, None])
    likeliest = logits_BV.argmax(-1) if greedy.any() else None
    probs_BV = torch.softmax(logits_BV, -1, out=logits_BV)
    weights_BV = probs_BV if greedy.all() else _cut(probs_BV, rules)
    if likeliest is None:
        tokens = _draw(weights_BV, rules)
    elif greedy.all():
        tokens = likeliest
    else:
        tokens = torch.where(torch.from_numpy(greedy), likeliest, _draw(weights_BV, rules))
    logprobs = probs_BV.gather(-1, tokens[:, None])[:, 0].log()
    (keeping,) = np.nonzero(rules.keeps)
    kept: dict[int, IntArray] = {}
    for row in keeping.tolist():
        # What is kept with a probability of 0 cannot be drawn.
        kept[row] = weights_BV[row].nonzero()[:, 0].to(torch.int32).numpy()
        logprobs[row] -= weights_BV[row].sum().log()
    return Sampled(tokens.numpy(), logprobs.numpy(), kept)


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1 - 2^-40] for each (seed, index): SplitMix64's finaliser (Steele et al., 2014), twice.

    Far enough below 1 that its product with a total, rounded, stays below the total.
    """
    bits = _mix(_mix(seeds) + indices * _GOLDEN) >> np.uint64(24)
    return bits.astype(np.float64) * 2.0**-40


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def _draw(weights_BV: Tensor, rules: Rules) -> Tensor:
    """Tokens [B] with probability proportional to their weights.

    From a large vocabulary in two steps, a block of it and a token in the block, so that only one
    block per row is added up token by token.
    """
    uniform_B1 = torch.from_numpy(uniform(rules.seeds, rules.indices))[:, None]
    if weights_BV.shape[-1] <= _ONE_BLOCK:
        return _pick(weights_BV, uniform_B1)[:, 0]
    padding = -weights_BV.shape[-1] % _BLOCK
    weights_BV = functional.pad(weights_BV, (0, padding)) if padding else weights_BV
    blocks_BKW = weights_BV.view(weights_BV.shape[0], -1, _BLOCK)
    mass_BK = blocks_BKW.sum(-1).double()
    block_B1 = _pick(mass_BK, uniform_B1)
    # The position of the number in the chosen block, as a fraction of that block.
    before_B1 = (mass_BK.cumsum(-1) - mass_BK).gather(-1, block_B1)
    offset_B1 = uniform_B1 * mass_BK.sum(-1, keepdim=True) - before_B1
    fraction_B1 = (offset_B1 / mass_BK.gather(-1, block_B1)).clamp(0, 1 - 2.0**-40)
    inside_B1 = _pick(blocks_BKW[torch.arange(blocks_BKW.shape[0]), block_B1[:, 0]], fraction_B1)
    return (block_B1 * _BLOCK + inside_B1)[:, 0]


def _pick(weights_BN: Tensor, fraction_B1: Tensor) -> Tensor:
    """[B, 1]: where the running sum first exceeds this fraction of the total; such a weight is above 0."""
    ends_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(ends_BN, fraction_B1 * ends_BN[:, -1:], right=True)


def _cut(probs_BV: Tensor, rules: Rules) -> Tensor:
    """Zero the probabilities that top-k or top-p excludes, in the rows that set them.

    Both are of the whole distribution, as on SGLang (`filter_apply_order="joint"` in flashinfer): a token
    stays that is among the k likeliest, while those before it have at most the mass p.
    """
    (rows,) = np.nonzero((rules.top_p < 1) | (rules.top_k > 0))
    if not len(rows):
        return probs_BV
    where = torch.from_numpy(rows)
    ordered, order = probs_BV[where].sort(dim=-1, descending=True, stable=True)
    size = probs_BV.shape[-1]
    top_k = torch.from_numpy(np.where(rules.top_k[rows] > 0, rules.top_k[rows], size))
    before = ordered.cumsum(-1) - ordered
    is_kept = (torch.arange(size) < top_k[:, None]) & (before <= torch.from_numpy(rules.top_p[rows])[:, None])
    kept = torch.where(is_kept | (torch.arange(size) == 0), ordered, 0)
    cut_BV = probs_BV.clone()
    cut_BV[where] = torch.zeros_like(kept).scatter_(-1, order, kept)
    return cut_BV
