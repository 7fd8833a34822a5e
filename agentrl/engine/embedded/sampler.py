"""From logits to tokens, for all rows at once.

One uniform number per token, hashed from (seed, index of the token in its completion), picks by
the inverse of the cumulative distribution. So a seed reproduces a completion whatever else is in
the batch, and the noise costs one number a row rather than one per word of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """How each of B rows is sampled. seeds: uint64; indices: uint64, tokens sampled so far."""

    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    seeds: npt.NDArray[np.uint64]
    indices: npt.NDArray[np.uint64]


def sample(logits_BV: Tensor, rules: Rules) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens [B] and their logprobs [B], after temperature and before top-p and top-k.

    Temperature 0 takes the likeliest token; its logprob is that of temperature 1.
    """
    greedy = rules.temperature == 0
    divisor = np.where(greedy, np.float32(1), rules.temperature)
    if np.any(divisor != 1):
        logits_BV = logits_BV / torch.from_numpy(divisor)[:, None]
    probs_BV = torch.softmax(logits_BV, -1)
    if greedy.all():
        tokens = logits_BV.argmax(-1)
    else:
        tokens = _draw(_cut(probs_BV, rules), rules)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy), logits_BV.argmax(-1), tokens)
    logprobs = probs_BV.gather(-1, tokens[:, None])[:, 0].log()
    return tokens.numpy(), logprobs.numpy()


def uniform(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (seed, index): the SplitMix64 finaliser (Steele et al., 2014), twice."""
    bits = _mix(_mix(seeds) + indices * _GOLDEN) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def _draw(weights_BV: Tensor, rules: Rules) -> Tensor:
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    total_B = cumulative_BV[:, -1]
    target_B = torch.from_numpy(uniform(rules.seeds, rules.indices)) * total_B
    # Rounding may lift the target to the total itself, behind the last token.
    target_B = torch.minimum(target_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(cumulative_BV, target_B[:, None], right=True)[:, 0]


def _cut(probs_BV: Tensor, rules: Rules) -> Tensor:
    """Zero what top-k and top-p leave out, in the rows that ask for it."""
    (rows,) = np.nonzero((rules.top_p < 1) | (rules.top_k > 0))
    if not len(rows):
        return probs_BV
    where = torch.from_numpy(rows)
    ordered, order = probs_BV[where].sort(dim=-1, descending=True, stable=True)
    size = probs_BV.shape[-1]
    top_k = torch.from_numpy(np.where(rules.top_k[rows] > 0, rules.top_k[rows], size))
    kept = torch.where(torch.arange(size) < top_k[:, None], ordered, 0)
    # top-p counts within what top-k left; a token stays while those before it do not reach p.
    before = kept.cumsum(-1) - kept
    reach = torch.from_numpy(rules.top_p[rows])[:, None] * kept.sum(-1, keepdim=True)
    kept = torch.where((before < reach) | (torch.arange(size) == 0), kept, 0)
    cut_BV = probs_BV.clone()
    cut_BV[where] = torch.zeros_like(kept).scatter_(-1, order, kept)
    return cut_BV
