"""Causal attention inside each sequence of a packed row: what computes it, the fastest that is installed.

T: tokens of the row. H: heads, D: channels of a head.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.torch.attention import attention_within, folds_of

_HALF = (torch.bfloat16, torch.float16)


class Ends(NamedTuple):
    """Where the sequences of a row end. bounds: int32, 0 first; longest: tokens of the longest."""

    bounds: Tensor
    longest: int


Attend = Callable[[Tensor, Tensor, Tensor, Ends, float | None], Tensor]
"""Query [T, H, D], key and value [T, fewer heads, D], ends, scale -> [T, H, D]."""


class Kernel(NamedTuple):
    """name: as the log tells it."""

    name: str
    attend: Attend


def fastest(device: torch.device, dtype: torch.dtype) -> Kernel:
    """flash-attn, torch's own variable-length attention, or SDPA: the first that is there, and can do it.

    The first two run on GPUs, in half precision.
    """
    if device.type == "cuda" and dtype in _HALF:
        if find_spec("flash_attn") is not None:
            flash_attn = importlib.import_module("flash_attn")
            return Kernel(
                f"flash-attn {flash_attn.__version__}", partial(_flash, flash_attn.flash_attn_varlen_func)
            )
        varlen = _varlen_of_torch()
        if varlen is not None:
            return Kernel(f"torch {torch.__version__} varlen_attn", partial(_varlen, varlen))
    return Kernel(f"torch {torch.__version__} SDPA, sequences of like length together", by_length)


def by_length(query: Tensor, key: Tensor, value: Tensor, ends: Ends, scale: float | None) -> Tensor:
    """SDPA on any device: one call for all neighbouring sequences of like length."""
    lengths = tuple(stop - start for start, stop in pairwise(ends.bounds.tolist()))
    out = attention_within(_folds(lengths, query.device), query, key, value, scale=scale)
    return out.to(value.dtype)


# All layers of a model, and both passes, look at the same rows.
_folds = lru_cache(maxsize=64)(folds_of)


def _flash(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Ends,
    scale: float | None,
) -> Tensor:
    bounds, longest = ends
    return attention(query, key, value, bounds, bounds, longest, longest, softmax_scale=scale, causal=True)


def _varlen(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Ends,
    scale: float | None,
) -> Tensor:
    bounds, longest = ends
    return attention(
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=True
    )


def _varlen_of_torch() -> Callable[..., Tensor] | None:
    """None where torch has none yet, or one that cannot share keys and values among heads (before 2.12)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    attention: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(attention).parameters
    return attention if {"scale", "window_size", "enable_gqa"} <= known.keys() else None
