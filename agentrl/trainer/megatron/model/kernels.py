"""Causal attention inside each sequence of a packed row, by the fastest kernel that is installed.

T: tokens of the row. H: heads, D: channels of a head.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.attention import attention_within, folds_of, with_shared_heads

_log = logging.getLogger(__name__)
_HALF = (torch.bfloat16, torch.float16)


class Ends(NamedTuple):
    """The ends of a row's sequences. bounds: int32, 0 first; longest: tokens of the longest."""

    bounds: Tensor
    longest: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence; synchronizes with the GPU."""
        return tuple(stop - start for start, stop in pairwise(self.bounds.tolist()))


class Sides(NamedTuple):
    """The ends of the queries, and of the keys that they attend to: as many tokens, or more.

    The last query of a sequence attends to all its keys, the one before it to all but the last, and so on.
    """

    queries: Ends
    keys: Ends


Attend = Callable[[Tensor, Tensor, Tensor, Sides, float | None], Tensor]
"""Query [T, H, D], key and value [tokens of the keys, fewer heads, D], sides, scale -> [T, H, D]."""


class Kernel(NamedTuple):
    """An attention function, with its name for the log."""

    name: str
    attend: Attend


def fastest(device: torch.device, dtype: torch.dtype) -> Kernel:
    """flash-attn, torch's own variable-length attention, or SDPA: the first that is installed and supported.

    The first two run on GPUs, in half precision.
    """
    if device.type == "cuda" and dtype in _HALF:
        for kernel in (_flash_attn(), _varlen_of_torch()):
            if kernel is not None:
                return kernel
    return Kernel(f"torch {torch.__version__} SDPA, sequences of like length together", by_length)


def by_length(query: Tensor, key: Tensor, value: Tensor, sides: Sides, scale: float | None) -> Tensor:
    """SDPA on any device: one call for neighbouring sequences of like length, if both sides are the same."""
    if sides.queries is not sides.keys:
        return _per_sequence(query, key, value, sides, scale)
    out = attention_within(_folds(sides.queries.lengths, query.device), query, key, value, scale=scale)
    return out.to(value.dtype)


# All layers of a model, and both passes, use the same rows.
_folds = lru_cache(maxsize=64)(folds_of)


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, sides: Sides, scale: float | None) -> Tensor:
    outputs = []
    lengths = [ends.lengths for ends in sides]
    rows = (query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]))
    for parts in zip(*rows, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        size = (q.shape[2], k.shape[2])
        mask = torch.ones(size, dtype=torch.bool, device=q.device).tril(size[1] - size[0])
        outputs.append(with_shared_heads(q, k, v, mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(outputs)


def _flash_attn() -> Kernel | None:
    """None where it is not installed, or built for another torch."""
    if find_spec("flash_attn") is None:
        return None
    try:
        flash_attn = importlib.import_module("flash_attn")
        attention, version = flash_attn.flash_attn_varlen_func, flash_attn.__version__
    except (ImportError, AttributeError) as error:
        _log.warning("flash-attn is installed, but cannot be used: %s", error)
        return None
    return Kernel(f"flash-attn {version}", partial(_flash, attention))


def _flash(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sides: Sides,
    scale: float | None,
) -> Tensor:
    (bounds, longest), (key_bounds, longest_key) = sides
    return attention(
        query, key, value, bounds, key_bounds, longest, longest_key, softmax_scale=scale, causal=True
    )


def _varlen(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sides: Sides,
    scale: float | None,
) -> Tensor:
    (bounds, longest), (key_bounds, longest_key) = sides
    return attention(
        *(query, key, value, bounds, key_bounds, longest, longest_key),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=True,
    )


def _varlen_of_torch() -> Kernel | None:
    """None where torch has none, or one that cannot share keys and values among heads (before 2.12)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    attention: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(attention).parameters
    if not {"scale", "window_size", "enable_gqa"} <= parameters.keys():
        return None
    return Kernel(f"torch {torch.__version__} varlen_attn", partial(_varlen, attention))
