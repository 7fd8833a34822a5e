"""Linear attention by a gated delta rule, in place of attention (Gated DeltaNet, https://arxiv.org/abs/2412.06464).

Megatron's own layer takes neither packed rows nor context ranks, and runs on a GPU only.

T: tokens of the unsharded row, t: those of this context rank. G: key heads of this rank; each has K channels
and serves R value heads of V channels. C: channels of a key head and all that belongs to it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    checkpoint,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus

from agentrl.losses import fused, to_device
from agentrl.trainer.attention import Ends, folds_of
from agentrl.trainer.megatron.model.feed_forward import recomputes_attention, row_settings
from agentrl.trainer.megatron.model.rows import gathered_places
from agentrl.trainer.megatron.model.rules import CHUNK, DeltaSizes

_EPS = 1e-6


class DeltaNet(nn.Module):
    """A layer of linear attention: each head has a state, which a token decays, reads and writes.

    The tensor ranks share the key heads. So do the context ranks, between two exchanges: a state goes through
    a whole sequence, so each gets all tokens of its share of the heads.
    """

    def __init__(self, config: TransformerConfig, delta: DeltaSizes, **_: object) -> None:
        super().__init__()
        tensor, dtype = config.tensor_model_parallel_size, config.params_dtype
        self._heads, self._times = delta.key_heads // tensor, delta.value_heads // delta.key_heads
        values = self._times * delta.value_channels
        self._sizes = [2 * delta.key_channels + values, values, 2 * self._times]
        self._keys, self._eps = delta.key_channels, config.layernorm_epsilon
        self._recomputes = recomputes_attention(config)
        # Megatron's names.
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(delta.rows("qkvzba")),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        channels = sum(delta.rows("qkv")) // tensor
        self.conv1d = nn.Conv1d(channels, channels, delta.taps, groups=channels, bias=False, dtype=dtype)
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(delta.value_heads // tensor, dtype=dtype)) for _ in range(2)
        )
        self.out_norm = _NormWeight(delta.value_channels, dtype)
        self.out_proj = RowParallelLinear(
            delta.rows("v")[0], config.hidden_size, config=config, **row_settings(config)
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSeqParams, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, width] -> [t, 1, width], and no bias."""
        ends: Ends = packed_seq_params.row.ends
        mixed, _no_bias = self.in_proj(hidden_states)
        mixed_tGC = mixed.view(len(mixed), self._heads, -1)
        qkv_tGC, gate_tGV, ba_tGC = mixed_tGC.split(self._sizes, -1)
        attended_tGV = self._attended(ends, torch.cat([qkv_tGC, ba_tGC], -1))
        # The ranks' heads share the weight: its gradient is the sum over them.
        weight_V = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        normed_tGV = _gated_norm(attended_tGV, gate_tGV, weight_V, self._eps)
        output: tuple[Tensor, Tensor | None] = self.out_proj(normed_tGV.flatten(1)[:, None])
        return output

    def _attended(self, ends: Ends, mixed_tGC: Tensor) -> Tensor:
        """What the heads read, [t, G, R x V]."""
        group = get_context_parallel_group()
        exchange = _HeadExchange.of(ends.lengths, group, mixed_tGC.device) if group.size() > 1 else None
        weight_GC1N = self.conv1d.weight.unflatten(0, (self._heads, -1))
        of_heads = [weight_GC1N, *(x.view(self._heads, -1) for x in (self.A_log, self.dt_bias))]
        if exchange is not None:
            mixed_tGC = exchange.to_heads(mixed_tGC)
            of_heads = [x.chunk(group.size())[group.rank()] for x in of_heads]
        attend = partial(self._within, ends)
        inputs = (mixed_tGC, *of_heads)
        recomputes = self._recomputes and self.training
        attended = checkpoint(attend, False, *inputs) if recomputes else attend(*inputs)
        return attended if exchange is None else exchange.to_tokens(attended)

    def _within(
        self, ends: Ends, mixed_TGC: Tensor, weight_GC1N: Tensor, a_log_GR: Tensor, dt_bias_GR: Tensor
    ) -> Tensor:
        """[T, G, C] of whole sequences -> [T, G, R x V]."""
        qkv_TGC, ba_TGC = mixed_TGC.split([self._sizes[0], self._sizes[2]], -1)
        convolved = convolved_within(qkv_TGC.flatten(1), weight_GC1N.flatten(0, 1), ends.lengths)
        heads = _heads_of(convolved.view_as(qkv_TGC), ba_TGC, a_log_GR, dt_bias_GR, self._keys)
        parts = []
        for fold in folds_of(ends.lengths, mixed_TGC.device):
            batch = (fold.batch(x).movedim(1, -1 if x.ndim == 3 else -2) for x in heads)
            attended_nGRLV = gated_delta_rule(*batch)
            parts.append(fold.tokens(attended_nGRLV.movedim(-2, 1)))
        attended_TGRV = torch.cat(parts) if len(parts) > 1 else parts[0]
        return attended_TGRV.flatten(2).to(mixed_TGC.dtype)


class _NormWeight(nn.Module):
    """A weight for each channel of a value head, the same for all heads, and on all tensor ranks."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))


@fused
def _gated_norm(attended_tGV: Tensor, gate_tGV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Each head normalised in fp32, times the weights, times silu(gate); as in Hugging Face's models."""
    shape = (*attended_tGV.shape[:2], -1, len(weight_V))
    normed = rms_norm(attended_tGV.float().reshape(shape), (len(weight_V),), eps=eps)
    weighted = weight_V * normed.to(weight_V.dtype)
    gated = weighted * silu(gate_tGV.float().reshape(shape))
    return gated.to(attended_tGV.dtype).reshape(attended_tGV.shape)


@fused
def _heads_of(
    qkv_TGC: Tensor, ba_TGC: Tensor, a_log_GR: Tensor, dt_bias_GR: Tensor, keys: int
) -> tuple[Tensor, ...]:
    """What `gated_delta_rule` takes, in fp32, with T in front."""
    times = a_log_GR.shape[1]
    activated = silu(qkv_TGC).float()
    query, key, value = activated.split([keys, keys, activated.shape[-1] - 2 * keys], -1)
    query, key = (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() for x in (query, key))
    written, forgotten = ba_TGC.float().split(times, -1)
    decay = -a_log_GR.float().exp() * softplus(forgotten + dt_bias_GR.float())
    value = value.unflatten(-1, (times, -1))
    return query[:, :, None] * keys**-0.5, key[:, :, None], value, decay, written.sigmoid()


def convolved_within(row_TC: Tensor, weight_C1N: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Each channel of each sequence of a row convolved by itself, causally; nothing precedes a sequence."""
    channels, _, taps = weight_C1N.shape
    places_T = _spread_places(lengths, taps - 1, row_TC.device)
    # Between the sequences lie zeros.
    size = len(row_TC) + len(lengths) * (taps - 1)
    spread = row_TC.new_zeros(size, channels).index_copy(0, places_T, row_TC)
    convolved = conv1d(spread.T[None], weight_C1N, groups=channels)[0].T
    return convolved.index_select(0, places_T - (taps - 1))


@lru_cache(maxsize=64)
def _spread_places(lengths: tuple[int, ...], gap: int, device: torch.device) -> Tensor:
    """The place of each token in a row in which as many others precede each sequence."""
    before = np.repeat(np.arange(1, len(lengths) + 1) * gap, lengths)
    return to_device(np.arange(sum(lengths)) + before, device)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """What each token of n sequences reads from the state S [K, V] of a head, of which it is 0 at first.

        S <- exp(decay) S;    S <- S + beta key (value - key^T S)^T;    read = query^T S

    Chunk by chunk: inside one, what its tokens write is the solution of a triangular system (the UT transform
    of https://arxiv.org/abs/2406.06484, with decays as in Gated DeltaNet).

    Args:
        query, key: [n, G, 1, L, K], with keys of length 1 at most.
        value: [n, G, R, L, V].
        decay, beta: [n, G, R, L], of at most 0, and of 0 to 1.

    Returns:
        [n, G, R, L, V].
    """
    length = value.shape[-2]
    size = min(CHUNK, length)
    chunks = -(-length // size)
    missing = chunks * size - length
    query, key, value = (
        pad(x, (0, 0, 0, missing)).unflatten(-2, (chunks, size)) for x in (query, key, value)
    )
    decay, beta = (pad(x, (0, missing)).unflatten(-1, (chunks, size)) for x in (decay, beta))
    since = decay.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    # Masked before it is exponentiated, where it could overflow.
    between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = beta[..., None] * (key @ key.mT) * between
    known = torch.cat([beta[..., None] * value, (beta * since.exp())[..., None] * key], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    written, overwritten = solved.split([value.shape[-1], key.shape[-1]], -1)
    carried = _Chunks(
        written,
        overwritten,
        query * since.exp()[..., None],
        key * (since[..., -1:] - since).exp()[..., None],
        (query @ key.mT) * between,
        since[..., -1:, None].exp(),
    )
    return _scanned(carried).flatten(-3, -2)[..., :length, :]


class _Chunks(NamedTuple):
    """Chunks of sequences, along the third last axis.

    written: without what the state before a chunk says of it, which is `overwritten` times that state. query,
    key: as they read that state, and write the next. scores: of tokens of one chunk. kept: of the state.
    """

    written: Tensor
    overwritten: Tensor
    query: Tensor
    key: Tensor
    scores: Tensor
    kept: Tensor


def _scanned(chunks: _Chunks) -> Tensor:
    """One chunk after the other, with the state between them."""
    state: Tensor | None = None
    outputs = []
    for written, overwritten, query, key, scores, kept in zip(*(x.unbind(-3) for x in chunks), strict=True):
        if state is None:
            outputs.append(scores @ written)
            state = key.mT @ written
            continue
        new = written - overwritten @ state
        outputs.append(query @ state + scores @ new)
        state = kept * state + key.mT @ new
    return torch.stack(outputs, -3)


class _HeadExchange(NamedTuple):
    """Between a part of all tokens, with all heads, and all tokens with a part of the heads.

    places: of each token of the unsharded row among those of all ranks, one rank after the other; order: the
    tokens in that order.
    """

    group: torch.distributed.ProcessGroup
    places: Tensor
    order: Tensor

    @classmethod
    def of(
        cls, lengths: tuple[int, ...], group: torch.distributed.ProcessGroup, device: torch.device
    ) -> _HeadExchange:
        """Of a row with sequences of these lengths."""
        return cls(group, *_orders(lengths, group.size(), device))

    def to_heads(self, x_tGC: Tensor) -> Tensor:
        """[t, G, C] -> [T, g, C], the g heads of this rank."""
        by_rank = x_tGC.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        received: Tensor = all_to_all(self.group, by_rank)
        return received.flatten(0, 1).index_select(0, self.places)

    def to_tokens(self, x_TgV: Tensor) -> Tensor:
        """[T, g, V] -> [t, G, V]: the way back."""
        by_rank = x_TgV.index_select(0, self.order).unflatten(0, (self.group.size(), -1))
        received: Tensor = all_to_all(self.group, by_rank)
        return received.transpose(0, 1).flatten(1, 2)


@lru_cache(maxsize=64)
def _orders(lengths: tuple[int, ...], ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    places = gathered_places(lengths, ranks)
    return to_device(places, device), to_device(np.argsort(places), device)
