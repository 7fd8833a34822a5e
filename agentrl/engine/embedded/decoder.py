"""The forward pass over a cache of slots; one function for prefill and decode.

Shapes: R rows (slots in this batch), S new tokens of a row, N = R x S, H query heads, K key heads,
D head size, C hidden size, L cached columns attended to.

The residual stream, norms and rotations are fp32 whatever the dtype of the weights.
Padding writes to a scratch column behind the cache's last one, and is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.linear import rms_norm
from agentrl.engine.embedded.parameters import LayerParameters, Parameters

_COLUMNS_STEP = 16


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """New tokens for some slots.

    slots: int64 [R]. tokens: int64 [R, S]. columns: int64 [R, S], where each token stands in its
    slot; the scratch column for padding. length: columns below it are attended to.
    pick: int64 [P], flat indices into [R, S] of the tokens whose logits are wanted.
    """

    slots: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    length: int
    pick: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """What all layers of one forward pass share."""

    rows: slice | Tensor
    length: int
    num_rows: int
    turns: Tensor
    write: Tensor
    mask: Tensor


class Decoder:
    """Keys and values of every slot, and the pass that extends them."""

    def __init__(
        self, architecture: Architecture, num_slots: int, context_len: int, dtype: torch.dtype
    ) -> None:
        a = architecture
        self._architecture = a
        self.scratch = context_len
        self._kv = torch.zeros(
            a.num_layers, num_slots, 2 * a.num_kv_heads, context_len + 1, a.head_dim, dtype=dtype
        )
        angles = torch.outer(torch.arange(context_len + 1, dtype=torch.float32), a.inv_freq)
        self._turns = torch.polar(torch.full_like(angles, a.rope_scale), angles)
        self._columns = torch.arange(context_len + 1)
        self._heads = torch.arange(2 * a.num_kv_heads)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache."""
        return self._kv.nbytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of a slot to another slot."""
        self._kv[:, target, :, :length] = self._kv[:, source, :, :length]

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap the first `length` columns of two slots."""
        kept = self._kv[:, a, :, :length].clone()
        self.move(b, a, length)
        self._kv[:, b, :, :length] = kept

    def free(self) -> None:
        """Give the cache's memory back; nothing can be computed afterwards."""
        self._kv = self._kv.new_empty(0)

    def forward(self, parameters: Parameters, batch: Batch) -> Tensor:
        """Write the batch's keys and values; float32 logits [P, vocabulary] of the picked tokens."""
        x = functional.embedding(torch.from_numpy(batch.tokens).reshape(-1), parameters.embedding).float()
        shared = self._share(batch)
        for index, layer in enumerate(parameters.layers):
            x = self._attend(layer, index, x, shared)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
            x = layer.down.add_to(x, functional.silu(gate).mul_(up))
        if batch.pick.size != batch.tokens.size:
            x = x[torch.from_numpy(batch.pick)]
        return parameters.head(self._norm(x, parameters.norm)).float()

    def _share(self, batch: Batch) -> _Shared:
        a = self._architecture
        columns = torch.from_numpy(batch.columns)
        slots = torch.from_numpy(batch.slots)
        # Few distinct lengths keep the kernels' shapes, and with them the results, stable.
        length = min(-(-batch.length // _COLUMNS_STEP) * _COLUMNS_STEP, self.scratch)
        seen = self._columns[:length] <= columns[:, :, None]
        mask = torch.zeros(seen.shape, dtype=self._kv.dtype).masked_fill_(~seen, float("-inf"))
        num_rows = len(batch.slots)
        first = int(batch.slots[0])
        dense = int(batch.slots[-1]) - first + 1 == num_rows
        heads = slots[:, None] * 2 * a.num_kv_heads + self._heads
        write = heads[:, None, :] * (self.scratch + 1) + columns[:, :, None]
        flat = columns.reshape(-1)
        return _Shared(
            rows=slice(first, first + num_rows) if dense else slots,
            length=length,
            num_rows=num_rows,
            turns=self._turns[flat].unsqueeze(1),
            write=write.reshape(-1),
            mask=mask.unsqueeze(1),
        )

    def _norm(self, x_NC: Tensor, weight_C: Tensor) -> Tensor:
        return rms_norm(x_NC, weight_C, self._architecture.rms_norm_eps).to(self._kv.dtype)

    def _attend(self, layer: LayerParameters, index: int, x_NC: Tensor, shared: _Shared) -> Tensor:
        a = self._architecture
        num_heads, num_kv = a.num_heads, a.num_kv_heads
        heads = layer.qkv(self._norm(x_NC, layer.input_norm)).view(x_NC.shape[0], -1, a.head_dim)
        qk = heads[:, :-num_kv]
        turned = qk.float()
        if layer.qk_norm is not None:
            turned = rms_norm(turned, layer.qk_norm, a.rms_norm_eps)
        _turn(turned, shared.turns)
        if turned is not qk:
            qk.copy_(turned)
        cache = self._write(index, heads[:, num_heads:], shared)
        mixed = functional.scaled_dot_product_attention(
            heads[:, :num_heads].view(shared.num_rows, -1, num_heads, a.head_dim).transpose(1, 2),
            cache[:, :num_kv],
            cache[:, num_kv:],
            attn_mask=shared.mask,
            enable_gqa=num_heads > num_kv,
        )
        return layer.out.add_to(x_NC, mixed.transpose(1, 2).reshape(x_NC.shape[0], -1))

    def _write(self, layer: int, new_N2KD: Tensor, shared: _Shared) -> Tensor:
        """Store the new columns, return all that are attended to: [R, 2K, L, D]."""
        cache = self._kv[layer]
        head_dim = self._architecture.head_dim
        cache.view(-1, head_dim).index_copy_(0, shared.write, new_N2KD.reshape(-1, head_dim))
        if isinstance(shared.rows, slice):
            return cache[shared.rows, :, : shared.length]
        return cache[:, :, : shared.length].index_select(0, shared.rows)


def _turn(x_NHD: Tensor, turns: Tensor) -> None:
    """Rotate pairs of neighbours, in place, by their position's angles (RoPE, Su et al., 2021)."""
    torch.view_as_complex(x_NHD.view(*x_NHD.shape[:-1], -1, 2)).mul_(turns)
