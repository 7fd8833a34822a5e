"""The forward pass over a cache of slots; one function for prefill and decode.

Shapes: R rows (slots in this batch), S new tokens of a row, N = R x S, H query heads, K key heads,
D head size, C hidden size, L cached columns attended to.

The residual stream, norms and rotations are fp32 whatever the dtype of the weights.
Padding is written to a scratch column after the cache's last one, and never read.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.norm import RmsNorm
from agentrl.engine.embedded.parameters import LayerParameters, Parameters

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MADV_HUGEPAGE") else {}


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """Like torch.zeros, on huge pages where the system has them (attention is 5% faster)."""
    size = math.prod(shape)
    memory = mmap.mmap(-1, max(1, size * dtype.itemsize), **_PRIVATE)
    if _PRIVATE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """New tokens for some slots.

    slots: int64 [R]. tokens: int64 [R, S]. columns: int64 [R, S], the position of each token in its
    slot; the scratch column for padding. length: columns below it are attended to.
    pick: int64 [P], flat indices into [R, S] of the tokens whose logits are computed.
    gathers: attend to a copy of each row's columns, wherever its slot is; a slot may then have several rows.
    """

    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    length: int
    pick: npt.NDArray[np.int64]
    gathers: bool = False


class _CacheWrite(NamedTuple):
    """Rows of the flat cache to write, [N x 2K]. rotations: of the new tokens, complex [N, 1, D / 2]."""

    rotations: Tensor
    rows: Tensor


class _CacheRead(NamedTuple):
    """What queries attend to: the first `length` columns of `slots`, under the mask [R, 1, S, L]."""

    slots: slice | Tensor
    length: int
    mask: Tensor


class Decoder:
    """The key-value cache of every slot, and the forward pass that extends it."""

    def __init__(
        self, architecture: Architecture, num_slots: int, context_len: int, dtype: torch.dtype
    ) -> None:
        a = architecture
        self._architecture = a
        self.scratch = context_len
        self._kv = zeros(
            a.num_layers, num_slots, 2 * a.num_kv_heads, context_len + 1, a.head_dim, dtype=dtype
        )
        angles = torch.outer(torch.arange(context_len + 1, dtype=torch.float32), a.inv_freq)
        self._rotations = torch.polar(torch.full_like(angles, a.rope_scale), angles)
        heads = np.arange(num_slots * 2 * a.num_kv_heads).reshape(num_slots, -1)
        self._first_rows = heads * (context_len + 1)
        # The mask of a query in column c is the window that begins c elements before the first -inf.
        self._horizon = torch.zeros(2 * (context_len + 1), dtype=dtype)
        self._horizon[context_len + 1 :] = float("-inf")

    @property
    def num_bytes(self) -> int:
        """The size of the cache in bytes."""
        return self._kv.nbytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of a slot to another slot."""
        self._kv[:, target, :, :length] = self._kv[:, source, :, :length]

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap the first `length` columns of two slots."""
        saved = self._kv[:, a, :, :length].clone()
        self.move(b, a, length)
        self._kv[:, b, :, :length] = saved

    def free(self) -> None:
        """Free the cache; the decoder is unusable afterwards."""
        self._kv = self._kv.new_empty(0)

    def forward(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Cache the batch's keys and values; returns float32 logits [P, vocabulary] of the picked tokens."""
        x = functional.embedding(
            torch.from_numpy(batch.tokens).reshape(-1), parameters.outer.embedding
        ).float()
        pick = torch.from_numpy(batch.pick)
        write = self._cache_write(batch)
        read = self._cache_read(batch.slots, batch.columns, batch)
        last = len(parameters.layers) - 1
        num_new = batch.tokens.shape[1]
        for index, layer in enumerate(parameters.layers):
            heads = self._project(layer, index, x, write)
            if index == last and not batch.pick.size:
                return x.new_empty(0, self._architecture.vocab_size)
            if index == last and num_new > 1:
                # The last layer's outputs for the other tokens are not used.
                x, heads = x[pick], heads[pick]
                columns = batch.columns.reshape(-1, 1)[batch.pick]
                read = self._cache_read(batch.slots[batch.pick // num_new], columns, batch)
            layer.out.add_to_(x, self._attend(index, heads, read))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
            layer.down.add_to_(x, functional.silu(gate, inplace=True).mul_(up))
        if x.shape[0] != pick.shape[0]:
            x = x[pick]
        return parameters.outer.head(self._norm(x, parameters.outer.norm)).float()

    def _cache_write(self, batch: Batch) -> _CacheWrite:
        rows = self._first_rows[batch.slots][:, None, :] + batch.columns[:, :, None]
        columns = torch.from_numpy(batch.columns.reshape(-1))
        rotations = self._rotations.index_select(0, columns).unsqueeze(1)
        return _CacheWrite(rotations, torch.from_numpy(rows.reshape(-1)))

    def _cache_read(
        self, slots: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], batch: Batch
    ) -> _CacheRead:
        length = batch.length
        starts = torch.from_numpy(self.scratch - columns.reshape(-1))
        mask = self._horizon.unfold(0, length, 1).index_select(0, starts)
        dense = not batch.gathers and slots[-1] - slots[0] + 1 == len(slots)
        rows = slice(int(slots[0]), int(slots[-1]) + 1) if dense else torch.from_numpy(slots)
        return _CacheRead(rows, length, mask.view(columns.shape[0], 1, -1, length))

    def _norm(self, x_NC: Tensor, norm: RmsNorm) -> Tensor:
        return norm(x_NC).to(self._kv.dtype)

    def _project(self, layer: LayerParameters, index: int, x_NC: Tensor, write: _CacheWrite) -> Tensor:
        """Queries, keys and values, rotated to their positions, [N, H + 2K, D]; caches the latter two."""
        a = self._architecture
        heads = layer.qkv(self._norm(x_NC, layer.input_norm)).view(x_NC.shape[0], -1, a.head_dim)
        qk = heads[:, : -a.num_kv_heads]
        # In fp32 these are the same memory, and all operations are in place.
        rotated = qk.float()
        if layer.qk_norm is not None:
            layer.qk_norm.apply_(rotated)
        _rotate(rotated, write.rotations)
        if rotated is not qk:
            qk.copy_(rotated)
        new = heads[:, a.num_heads :].reshape(-1, a.head_dim)
        self._kv[index].view(-1, a.head_dim).index_copy_(0, write.rows, new)
        return heads

    def _attend(self, index: int, heads: Tensor, read: _CacheRead) -> Tensor:
        """Attention of the queries in [N, H + 2K, D] over the cache, [N, H x D]."""
        a = self._architecture
        cache = self._kv[index]
        if isinstance(read.slots, slice):
            cache = cache[read.slots, :, : read.length]
        else:
            cache = cache[:, :, : read.length].index_select(0, read.slots)
        queries = heads[:, : a.num_heads].view(cache.shape[0], -1, a.num_heads, a.head_dim)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            cache[:, : a.num_kv_heads],
            cache[:, a.num_kv_heads :],
            attn_mask=read.mask,
            enable_gqa=a.num_heads > a.num_kv_heads,
        )
        return mixed.transpose(1, 2).reshape(heads.shape[0], -1)


def _rotate(x_NHD: Tensor, rotations: Tensor) -> None:
    """Rotate pairs of adjacent elements, in place, by their position's angles (RoPE, Su et al., 2021)."""
    torch.view_as_complex(x_NHD.view(*x_NHD.shape[:-1], -1, 2)).mul_(rotations)
