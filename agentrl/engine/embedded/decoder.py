"""The forward pass over a cache of slots; one function for prefill and decode.

Shapes: R rows (slots in this batch), S new tokens of a row, N = R x S, H query heads, K key heads,
D head size, C hidden size, L cached columns attended to.

The residual stream, norms and rotations are fp32 whatever the dtype of the weights.
Padding is written to a scratch column after the cache's last one, and never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.layers import RmsNorm, Scratch, zeros
from agentrl.engine.embedded.parameters import LayerParameters, Parameters

_DENSE_BYTES = 1 << 18
"""Up to this size the slots of a cache are on huge pages, of which each then holds several."""


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


class _DecodeRead(NamedTuple):
    """What one query a row attends to: `length` columns of K cached heads for each row.

    mask: [R x K, 1, L]; None = every row attends to all of these columns.
    """

    heads: slice
    length: int
    mask: Tensor | None


class Weights(Protocol):
    """The weights that serve, in a form that a forward pass computes with."""

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""

    @property
    def vocab_size(self) -> int:
        """The tokens of the vocabulary (count)."""

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a sequence."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, by the name that its family saves it under."""


class ForwardPass(Protocol):
    """The cache of every slot, and the forward pass that extends it. scratch: the column of padding."""

    scratch: int

    @property
    def num_bytes(self) -> int:
        """The size of the cache in bytes."""

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap the first `length` columns of two slots."""

    def allocate(self) -> None:
        """Allocate the cache."""

    def free(self) -> None:
        """Free the cache; until `allocate` it is unusable."""

    def forward(self, parameters: Weights, batch: Batch) -> Tensor:
        """Cache the batch's tokens; returns float32 logits [P, vocabulary] of the picked ones."""


class Decoder:
    """The key-value cache of every slot, and the forward pass that extends it."""

    def __init__(
        self, architecture: Architecture, num_slots: int, context_len: int, dtype: torch.dtype
    ) -> None:
        a = architecture
        self._architecture = a
        self._num_slots, self._dtype = num_slots, dtype
        self.scratch = context_len
        self.allocate()
        angles = torch.outer(torch.arange(context_len + 1, dtype=torch.float32), a.inv_freq)
        self._rotations = torch.polar(torch.full_like(angles, a.rope_scale), angles)
        heads = np.arange(2 * num_slots * a.num_kv_heads).reshape(2, num_slots, -1)
        self._first_rows = np.concatenate([*heads], axis=1) * (context_len + 1)
        # The mask of a query in column c is the window that begins c elements before the first -inf.
        self._horizon = torch.zeros(2 * (context_len + 1), dtype=dtype)
        self._horizon[context_len + 1 :] = float("-inf")

    @property
    def num_bytes(self) -> int:
        """The size of the cache in bytes."""
        return self._kv.nbytes

    def move(self, source: int, target: int, length: int, *, start: int = 0) -> None:
        """Copy columns of a slot to another slot; those before `start` are there already."""
        self._kv[:, :, target, :, start:length] = self._kv[:, :, source, :, start:length]

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap the first `length` columns of two slots."""
        saved = self._kv[:, :, a, :, :length].clone()
        self.move(b, a, length)
        self._kv[:, :, b, :, :length] = saved

    def allocate(self) -> None:
        """Allocate the cache, and no memory for results yet."""
        a, dtype = self._architecture, self._dtype
        # Keys and values of each layer: [2, slots, K, columns, D].
        shape = (a.num_layers, 2, self._num_slots, a.num_kv_heads, self.scratch + 1, a.head_dim)
        # A short sequence writes the beginning of a long slot: on huge pages it would take all of the slot.
        slot_bytes = (self.scratch + 1) * a.head_dim * dtype.itemsize
        self._kv = zeros(*shape, dtype=dtype, is_dense=slot_bytes <= _DENSE_BYTES)
        # Rows of D numbers are written as fewer, wider ones: index_copy_ moves them one by one.
        wide = torch.complex128 if a.head_dim * dtype.itemsize % 16 == 0 else dtype
        self._rows = self._kv.view(a.num_layers, -1, a.head_dim).view(wide)
        self._new_scratch()

    def free(self) -> None:
        """Free the cache; until `allocate` the decoder is unusable."""
        self._kv = self._rows = self._kv.new_empty(0)
        self._new_scratch()

    def _new_scratch(self) -> None:
        self._qkv, self._gate_up, self._scores, self._mixed = (Scratch(self._dtype) for _ in range(4))
        self._normed = Scratch(torch.float32)

    def forward(self, parameters: Weights, batch: Batch) -> Tensor:
        """Cache the batch's keys and values; returns float32 logits [P, vocabulary] of the picked tokens."""
        assert isinstance(parameters, Parameters), "an engine's decoder is that of its weights"
        x = functional.embedding(
            torch.from_numpy(batch.tokens).reshape(-1), parameters.outer.embedding
        ).float()
        pick = torch.from_numpy(batch.pick)
        write = self._cache_write(batch)
        read = self._decode_read(batch) or self._cache_read(batch.slots, batch.columns, batch)
        last = len(parameters.layers) - 1
        num_new = batch.tokens.shape[1]
        for index, layer in enumerate(parameters.layers):
            heads = self._project(layer, index, x, write)
            if index == last and not batch.pick.size:
                return x.new_empty(0, self._architecture.vocab_size)
            if index == last and num_new > 1 and len(pick) <= len(batch.slots):
                # The last layer's outputs for the other tokens are not used. Each picked token attends to a
                # copy of its slot, so there may be few of them.
                x, heads = x[pick], heads[pick]
                columns = batch.columns.reshape(-1, 1)[batch.pick]
                read = self._cache_read(batch.slots[batch.pick // num_new], columns, batch)
            layer.out.add_to_(x, self._attend(index, heads, read))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm), self._gate_up).chunk(2, -1)
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

    def _decode_read(self, batch: Batch) -> _DecodeRead | None:
        """None where the products of `_decode` do not apply: in bf16 they would round the scores."""
        slots, columns, length = batch.slots, batch.columns, batch.length
        dense = slots[-1] - slots[0] + 1 == len(slots)
        if columns.shape[1] > 1 or batch.gathers or not dense or self._kv.dtype != torch.float32:
            return None
        size = self._architecture.num_kv_heads
        heads = slice(int(slots[0]) * size, (int(slots[-1]) + 1) * size)
        if (columns == length - 1).all():
            return _DecodeRead(heads, length, None)
        starts = torch.from_numpy(np.repeat(self.scratch - columns[:, 0], size))
        mask = self._horizon.unfold(0, length, 1).index_select(0, starts)
        return _DecodeRead(heads, length, mask[:, None])

    def _norm(self, x_NC: Tensor, norm: RmsNorm) -> Tensor:
        return norm(x_NC, self._normed).to(self._kv.dtype)

    def _project(self, layer: LayerParameters, index: int, x_NC: Tensor, write: _CacheWrite) -> Tensor:
        """Queries, keys and values, rotated to their positions, [N, H + 2K, D]; caches the latter two."""
        a = self._architecture
        qkv = layer.qkv(self._norm(x_NC, layer.input_norm), self._qkv)
        heads = qkv.view(x_NC.shape[0], -1, a.head_dim)
        qk = heads[:, : -a.num_kv_heads]
        # In fp32 these are the same memory, and all operations are in place.
        rotated = qk.float()
        if layer.qk_norm is not None:
            layer.qk_norm.apply_(rotated)
        _rotate(rotated, write.rotations)
        if rotated is not qk:
            qk.copy_(rotated)
        new = heads[:, a.num_heads :].reshape(-1, a.head_dim).view(self._rows.dtype)
        self._rows[index].index_copy_(0, write.rows, new)
        return heads

    def _decode(self, index: int, heads: Tensor, read: _DecodeRead) -> Tensor:
        """Attention of one query a row in [N, H + 2K, D] over the cache, [N, H x D].

        Two batches of products, for every row and key head, are faster than the kernel of `_attend`,
        which calls a multiplication for each.
        """
        a = self._architecture
        cached = self._kv[index].flatten(1, 2)[:, read.heads, : read.length]
        queries = torch.mul(heads[:, : a.num_heads], a.head_dim**-0.5)
        queries = queries.view(cached.shape[1], -1, a.head_dim)
        keys, values = cached[0].transpose(1, 2), cached[1]
        scores = self._scores(*queries.shape[:2], read.length)
        if read.mask is None:
            torch.bmm(queries, keys, out=scores)
        else:
            torch.baddbmm(read.mask, queries, keys, out=scores)
        torch.softmax(scores, -1, out=scores)
        return torch.bmm(scores, values, out=self._mixed(*queries.shape)).view(heads.shape[0], -1)

    def _attend(self, index: int, heads: Tensor, read: _CacheRead | _DecodeRead) -> Tensor:
        """Attention of the queries in [N, H + 2K, D] over the cache, [N, H x D]."""
        if isinstance(read, _DecodeRead):
            return self._decode(index, heads, read)
        a = self._architecture
        keys, values = self._kv[index, :, :, :, : read.length]
        if isinstance(read.slots, slice):
            keys, values = keys[read.slots], values[read.slots]
        else:
            keys, values = keys.index_select(0, read.slots), values.index_select(0, read.slots)
        queries = heads[:, : a.num_heads].view(keys.shape[0], -1, a.num_heads, a.head_dim)
        if queries.shape[1] == 1:
            # Heads that share keys, as queries of one head: in bf16 three times as fast, and the same bits.
            queries = queries.view(keys.shape[0], a.num_kv_heads, -1, a.head_dim)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=read.mask)
            return mixed.reshape(heads.shape[0], -1)
        mixed = functional.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys,
            values,
            attn_mask=read.mask,
            enable_gqa=a.num_heads > a.num_kv_heads,
        )
        return mixed.transpose(1, 2).reshape(heads.shape[0], -1)


def _rotate(x_NHD: Tensor, rotations: Tensor) -> None:
    """Rotate pairs of adjacent elements, in place, by their position's angles (RoPE, Su et al., 2021)."""
    torch.view_as_complex(x_NHD.view(*x_NHD.shape[:-1], -1, 2)).mul_(rotations)
