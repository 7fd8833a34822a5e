"""Causal attention inside each sequence of a flat row.

A mask over the row would cost the square of its length, nearly all of it wasted. Here sequences of like
length are folded into a batch: the cost is that of the sequences, and independent of the row's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.losses import to_device

_SHORTEST = 0.8
"""A batch's shortest sequence, as a share of its longest: bounds the padding."""


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Neighbouring sequences as a batch: tokens start to stop of the row become [count, longest].

    fold: the index in the run of each cell of the batch; unfold: the cells that are not padding. Both are
    None where the sequences are of one length. A sequence is padded at its end with its own last token,
    where causal attention hides it from all other tokens.
    """

    start: int
    stop: int
    count: int
    longest: int
    fold: Tensor | None
    unfold: Tensor | None


def folds_of(lengths: Sequence[int], device: torch.device) -> tuple[Fold, ...]:
    """Cut a row of sequences, long before short, into batches of like length."""
    folds: list[Fold] = []
    run: list[int] = []
    start = 0
    for length in lengths:
        if run and not _SHORTEST * run[0] <= length <= run[0]:
            folds.append(_fold(run, start, device))
            start, run = folds[-1].stop, []
        run.append(length)
    if run:
        folds.append(_fold(run, start, device))
    return tuple(folds)


def _fold(run: list[int], start: int, device: torch.device) -> Fold:
    stop = start + sum(run)
    if len(set(run)) == 1:
        return Fold(start, stop, len(run), run[0], None, None)
    lengths = np.array(run)
    longest = int(lengths.max())
    starts = np.cumsum(lengths) - lengths
    cells = np.arange(longest)[None, :]
    fold = starts[:, None] + np.minimum(cells, lengths[:, None] - 1)
    unfold = np.flatnonzero(cells < lengths[:, None])
    return Fold(
        start,
        stop,
        len(run),
        longest,
        to_device(fold.reshape(-1), device),
        to_device(unfold, device),
    )


def attention_within(
    folds: Sequence[Fold], query: Tensor, key: Tensor, value: Tensor, *, scale: float | None
) -> Tensor:
    """Query, key and value [T, heads, head_dim] -> [T, heads, head_dim], on a CPU at least in fp32."""
    # On CPU its backward pass takes several times as long in bfloat16 as in fp32.
    least = torch.float32 if query.device.type == "cpu" else value.dtype
    query, key, value = (x.to(torch.promote_types(value.dtype, least)) for x in (query, key, value))
    parts = []
    for fold in folds:
        q, k, v = (_folded(x, fold) for x in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            out = with_shared_heads(q, k, v, mask=None, scale=scale)
        flat = out.transpose(1, 2).reshape(fold.count * fold.longest, *out.shape[1::2])
        parts.append(flat if fold.unfold is None else flat.index_select(0, fold.unfold))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def with_shared_heads(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, scale: float | None
) -> Tensor:
    """SDPA of query [B, H, Q, D] over key and value [B, fewer heads, K, D]. mask [Q, K]; None = causal."""
    times = query.shape[1] // key.shape[1]
    if times > 1 and query.is_cuda and query.dtype == torch.float32:
        # No GPU kernel shares heads in fp32: the fallback would materialize all scores.
        key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        times = 1
    return scaled_dot_product_attention(
        *(query, key, value), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=times > 1
    )


def _folded(x: Tensor, fold: Fold) -> Tensor:
    """[T, heads, head_dim] -> [count, heads, longest, head_dim]."""
    run = x[fold.start : fold.stop]
    if fold.fold is not None:
        run = run.index_select(0, fold.fold)
    return run.reshape(fold.count, fold.longest, *run.shape[1:]).transpose(1, 2)
