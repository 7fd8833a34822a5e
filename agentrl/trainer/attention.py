"""Causal attention inside each sequence of a packed row, by the fastest kernel that is installed.

T: tokens of the row. H: heads, D: channels of a head. A mask over the row would cost the square of its
length, nearly all of it wasted. The kernels take the bounds of the sequences; where none of them runs,
sequences of like length are folded into a batch: the cost is that of the sequences, and independent of the
row's length. A window costs the kernels less, and there a mask over the sequences of a batch.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from agentrl.losses import compiles, to_device

_log = logging.getLogger(__name__)
SHORTEST = 0.8
"""A batch's shortest sequence, as a share of its longest: bounds the padding."""
_MOST_SHARED = 0.875
"""The tokens that remain of a row, as a share of its own, above which sharing them does not pay."""
_HALF = (torch.bfloat16, torch.float16)
_AMPERE, _HOPPER = (8, 0), (9, 0)


class Ends(NamedTuple):
    """The ends of a row's sequences. bounds: int32 on the device, 0 first. lengths: on the host."""

    bounds: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Ends:
        """Sequences of these lengths, one after the other."""
        return cls(to_device(np.cumsum([0, *lengths], dtype=np.int32), device), tuple(lengths))

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(self.lengths)


class Beginnings(NamedTuple):
    """What sequences of a row begin with, once. U: the tokens that remain of its T.

    places: int64 [T], where each token of the row is among those. firsts: int64 [U], where these are in the
    row, each for the first time. on_host: both, in the CPU's memory.
    """

    places: Tensor
    firsts: Tensor
    on_host: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

    @classmethod
    def of(
        cls, ids_T: npt.NDArray[np.int64], lengths: Sequence[int], device: torch.device
    ) -> Beginnings | None:
        """Of a row of sequences; None = too few begin alike for it to pay."""
        known: dict[tuple[int, int], int] = {}
        places: list[int] = []
        ids = ids_T.tolist()
        for start, length in zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False):
            # A token is known by what is before it in its sequence, and by itself.
            place = -1
            for token in ids[start : start + length]:
                place = known.setdefault((place, token), len(known))
                places.append(place)
        if len(known) > _MOST_SHARED * len(places):
            return None
        _, firsts = np.unique(places, return_index=True)
        places_T = np.array(places)
        return cls(to_device(places_T, device), to_device(firsts, device), (places_T, firsts))


class Sides(NamedTuple):
    """The ends of the queries, and of the keys that they attend to: as many tokens, or more.

    The last query of a sequence attends to all its keys, the one before it to all but the last, and so on.
    """

    queries: Ends
    keys: Ends


class Scoring(NamedTuple):
    """How a query scores keys. scale: of the products; None = 1 / sqrt(D).

    window: tokens that a query attends to, its own included; None = all before it. sinks: float [H], for each
    head a score of nothing: what the softmax gives it is lost (gpt-oss).
    """

    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


Attend = Callable[[Tensor, Tensor, Tensor, Sides, Scoring], Tensor]
"""Query [T, H, D], key and value [tokens of the keys, fewer heads, D], sides, scores -> [T, H, D]."""


class AttentionKernel(NamedTuple):
    """An attention function, with its name for the log."""

    name: str
    attend: Attend


def fastest(device: torch.device, dtype: torch.dtype, *, has_sinks: bool = False) -> AttentionKernel:
    """The first of these that is installed and runs there; the FlashAttentions need half precision.

    flash-attn 3 (Hopper), flash-attn 2, torch's own variable-length attention (from 2.12), the
    FlashAttention-2 under it (2.11), SDPA. has_sinks: of the last two, which alone have them.
    """
    if device.type == "cuda" and dtype in _HALF:
        kernels = [] if has_sinks else [_flash_attn_3(device), _flash_attn(), _varlen_of_torch()]
        for kernel in [*kernels, _flash_of_torch(device)]:
            if kernel is not None:
                return kernel
    return AttentionKernel(f"torch {torch.__version__} SDPA, sequences of like length together", by_length)


def kernels_in_words(device: torch.device, dtype: torch.dtype, *, has_sinks: bool = False) -> str | None:
    """The attention of a GPU, whether other kernels are compiled, and what would be faster; None = a CPU."""
    if device.type != "cuda":
        return None
    kernel = fastest(device, dtype, has_sinks=has_sinks)
    parts = [f"kernels of the trainer: attention by {kernel.name}"]
    if kernel.attend is by_length:
        parts.append("FlashAttention (bf16 = true, a GPU of 2020 or newer) would be several times as fast")
    elif (
        not has_sinks
        and torch.cuda.get_device_capability(device) == _HOPPER
        and "flash-attn 3" not in kernel.name
    ):
        parts.append("flash-attn 3 would be faster on this GPU")
    if not compiles(device):
        parts.append("the others are not compiled: install Triton and a C compiler")
    return "; ".join(parts) + "."


def by_length(query: Tensor, key: Tensor, value: Tensor, sides: Sides, scores: Scoring) -> Tensor:
    """SDPA on any device: one call for neighbouring sequences of like length, if both sides are the same."""
    if sides.queries is not sides.keys:
        return _per_sequence(query, key, value, sides, scores)
    out = attention_within(folds_of(sides.queries.lengths, query.device), query, key, value, scores)
    return out.to(value.dtype)


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, sides: Sides, scores: Scoring) -> Tensor:
    outputs = []
    lengths = [ends.lengths for ends in sides]
    rows = (query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]))
    for parts in zip(*rows, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        outputs.append(_sdpa(q, k, v, scores)[0].transpose(0, 1))
    return torch.cat(outputs)


def _places(sides: Sides) -> tuple[Tensor, Tensor, int, int]:
    """Bounds of queries and keys, and the longest of each: what all of these kernels take."""
    return sides.queries.bounds, sides.keys.bounds, sides.queries.longest, sides.keys.longest


def _flash_attn_3(device: torch.device) -> AttentionKernel | None:
    module = _imported("flash_attn_interface")
    attention = getattr(module, "flash_attn_varlen_func", None)
    if attention is None or torch.cuda.get_device_capability(device) != _HOPPER:
        return None
    return AttentionKernel(
        f"flash-attn 3 {getattr(module, '__version__', '')}".strip(), partial(_flash, attention)
    )


def _flash_attn() -> AttentionKernel | None:
    module = _imported("flash_attn")
    if module is None:
        return None
    attention = getattr(module, "flash_attn_varlen_func", None)
    if attention is None:
        _log.warning("flash-attn is installed, but cannot be used: it has no flash_attn_varlen_func")
        return None
    return AttentionKernel(
        f"flash-attn {getattr(module, '__version__', '')}".strip(), partial(_flash, attention)
    )


def _imported(name: str) -> ModuleType | None:
    """None where it is not installed, or built for another torch."""
    if find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _log.warning("%s is installed, but cannot be used: %s", name.replace("_", "-"), error)
        return None


def _flash(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sides: Sides,
    scores: Scoring,
) -> Tensor:
    window = {} if scores.window is None else {"window_size": (scores.window - 1, 0)}
    out = attention(query, key, value, *_places(sides), softmax_scale=scores.scale, causal=True, **window)
    # Some versions of flash-attn 3 return the normalisers, too.
    return out[0] if isinstance(out, tuple) else out


def _varlen(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sides: Sides,
    scores: Scoring,
) -> Tensor:
    window = (-1 if scores.window is None else scores.window - 1, 0)
    return attention(
        query, key, value, *_places(sides), scale=scores.scale, window_size=window, enable_gqa=True
    )


def _varlen_of_torch() -> AttentionKernel | None:
    """None where torch has none, or one that cannot share keys and values among heads (before 2.12)."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    attention: Callable[..., Tensor] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(attention).parameters
    if not {"scale", "window_size", "enable_gqa"} <= parameters.keys():
        return None
    return AttentionKernel(f"torch {torch.__version__} varlen_attn", partial(_varlen, attention))


def _flash_of_torch(device: torch.device) -> AttentionKernel | None:
    """The operator under `varlen_attn`, whose heads may share keys; None where torch lacks it, or the GPU."""
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    return AttentionKernel(f"torch {torch.__version__} FlashAttention-2", _flash_operator)


def _flash_operator(query: Tensor, key: Tensor, value: Tensor, sides: Sides, scores: Scoring) -> Tensor:
    if scores.sinks is not None:
        return _with_sinks(query, key, value, scores.sinks, (sides, scores))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *_places(sides), 0.0, True, False, **_options(scores)
    )[0]
    return out


def _options(scores: Scoring) -> dict[str, float | int | None]:
    left = None if scores.window is None else scores.window - 1
    return {"scale": scores.scale, "window_size_left": left, "window_size_right": 0}


class _SinksContext(torch.autograd.function.FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    row: tuple[Sides, Scoring]


class _Sinks(torch.autograd.Function):
    """FlashAttention-2 with a score of nothing for each head.

    A sink adds to the normalisers alone, by which the output is rescaled. The kernel's backward pass makes
    its probabilities from the scores, and what it subtracts from the output: with both as they are with
    sinks, so are its gradients.
    """

    @staticmethod
    def forward(
        ctx: _SinksContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor,
        row: tuple[Sides, Scoring],
    ) -> Tensor:
        sides, scores = row
        out, normaliser_HT, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *_places(sides), 0.0, True, False, **_options(scores)
        )
        summed_HT = torch.logaddexp(normaliser_HT, sinks_H.float()[:, None])
        share_TH1 = (normaliser_HT - summed_HT).exp().T[..., None]
        rescaled: Tensor = (out * share_TH1).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks_H, rescaled, summed_HT, state, unused)
        ctx.row = row
        return rescaled

    @staticmethod
    def backward(ctx: _SinksContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out, summed_HT, state, unused = ctx.saved_tensors
        sides, scores = ctx.row
        gradient = gradient.contiguous()
        of_row = torch.ops.aten._flash_attention_backward(
            *(gradient, query, key, value, out, summed_HT),
            *(*_places(sides), 0.0, True, state, unused),
            **_options(scores),
        )
        shares_HT = (sinks_H.float()[:, None] - summed_HT).exp()
        of_sinks = -(shares_HT * (gradient.float() * out.float()).sum(-1).T).sum(1)
        return *of_row, of_sinks.to(sinks_H.dtype), None


_with_sinks: Callable[..., Tensor] = _Sinks.apply


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Neighbouring sequences as a batch: tokens start to stop of the row become [count, longest].

    fold: the index in the run of each cell of the batch; unfold: the cells that are not padding, real_cells:
    the same in the CPU's memory. All are
    None where the sequences are of one length. A sequence is padded at its end with its own last token,
    where causal attention hides it from all other tokens.
    """

    start: int
    stop: int
    count: int
    longest: int
    fold: Tensor | None
    unfold: Tensor | None
    real_cells: npt.NDArray[np.int64] | None = None

    def batch(self, row: Tensor) -> Tensor:
        """[T, ...] -> [count, longest, ...]."""
        run = row[self.start : self.stop]
        if self.fold is not None:
            run = run.index_select(0, self.fold)
        return run.reshape(self.count, self.longest, *run.shape[1:])

    def tokens(self, batch: Tensor) -> Tensor:
        """[count, longest, ...] -> [start to stop, ...]: the way back, without padding."""
        flat = batch.flatten(0, 1)
        return flat if self.unfold is None else flat.index_select(0, self.unfold)


# All layers of a model, and both passes, use the same rows.
@lru_cache(maxsize=64)
def folds_of(
    lengths: tuple[int, ...], device: torch.device, *, shortest: float = SHORTEST
) -> tuple[Fold, ...]:
    """Cut a row of sequences, long before short, into batches of like length.

    shortest: a batch's shortest sequence, at least, as a share of its longest.
    """
    folds: list[Fold] = []
    run: list[int] = []
    start = 0
    for length in lengths:
        if run and not shortest * run[0] <= length <= run[0]:
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
        unfold,
    )


def attention_within(
    folds: Sequence[Fold], query: Tensor, key: Tensor, value: Tensor, scores: Scoring
) -> Tensor:
    """Query, key and value [T, heads, head_dim] -> [T, heads, head_dim], on a CPU at least in fp32."""
    # On CPU its backward pass takes several times as long in bfloat16 as in fp32.
    least = torch.float32 if query.device.type == "cpu" else value.dtype
    query, key, value = (x.to(torch.promote_types(value.dtype, least)) for x in (query, key, value))
    parts = []
    for fold in folds:
        q, k, v = (fold.batch(x).transpose(1, 2) for x in (query, key, value))
        with torch.autocast(query.device.type, enabled=False):
            out = _sdpa(q, k, v, scores)
        parts.append(fold.tokens(out.transpose(1, 2)))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scores: Scoring) -> Tensor:
    """Query [B, H, Q, D], key and value [B, fewer heads, K, D] -> [B, H, Q, D].

    The last query attends to the last key, the one before it to all but the last, and so on.
    """
    channels, mask = value.shape[-1], _mask(query.shape[2], key.shape[2], scores, query.device)
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    if scores.sinks is not None:
        query, key, value = _one_key_more(query, key, value, scores.sinks / scale)
    times = query.shape[1] // key.shape[1]
    if times > 1 and query.is_cuda and query.dtype == torch.float32:
        # No GPU kernel shares heads in fp32: the fallback would materialize all scores.
        key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        times = 1
    out = scaled_dot_product_attention(
        *(query, key, value), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=times > 1
    )
    return out[..., :channels]


def _mask(queries: int, keys: int, scores: Scoring, device: torch.device) -> Tensor | None:
    """[queries, keys]: whether one attends to the other; None = as causal attention says. A sink is the last
    key, which all attend to."""
    if queries == keys and scores.window is None and scores.sinks is None:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    if scores.window is not None:
        mask = mask.triu(keys - queries - scores.window + 1)
    return mask if scores.sinks is None else pad(mask, (0, 1), value=True)


def _one_key_more(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor) -> tuple[Tensor, ...]:
    """With a key whose product with each head's queries is a sink, and whose value is 0.

    Heads that share keys share this one, too: each has a channel of its own there.
    """
    batch, groups, _, channels = key.shape
    sharing = query.shape[1] // groups
    own = torch.eye(sharing, dtype=query.dtype, device=query.device).repeat(groups, 1)[None, :, None]
    query = torch.cat([query, own.expand(batch, -1, query.shape[2], -1)], -1)
    sink = pad(sinks_H.to(key.dtype).view(groups, 1, sharing), (channels, 0)).expand(batch, -1, -1, -1)
    # Values are as wide as keys for kernels that ask for it.
    return query, torch.cat([pad(key, (0, sharing)), sink], 2), pad(value, (0, sharing, 0, 1))
