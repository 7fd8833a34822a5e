"""Layers in place of Megatron's own, which run on a GPU only, or as one kernel for each operation.

T: tokens of a packed row on this rank. H: heads, D: channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from agentrl.losses import fused, to_device
from agentrl.trainer.attention import Ends, Scoring, Sides, fastest
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.model.delta import DeltaNet
from agentrl.trainer.megatron.model.experts import MoE
from agentrl.trainer.megatron.model.families import Family
from agentrl.trainer.megatron.model.feed_forward import (
    GatedMLP,
    NormedMLP,
    NormedRow,
    ReplicatedLinear,
    RMSNorm,
    recomputes_attention,
    row_settings,
    scaled,
)
from agentrl.trainer.megatron.model.rows import gathered_places
from agentrl.trainer.megatron.model.shape import Latent, Shape
from agentrl.trainer.megatron.model.windows import LayerAttention, Rotary
from agentrl.trainer.routing import RoutedRow


class Rotation:
    """Rotary positions of a model. pairs: they rotate neighbouring channels, not the two halves."""

    def __init__(self, rotary: Rotary, *, pairs: bool) -> None:
        angles_r = torch.tensor(rotary.angles, dtype=torch.float32, device=compute_device())
        self._angles_R = angles_r.repeat_interleave(2) if pairs else torch.cat([angles_r, angles_r])
        self._scale = rotary.scale

    def of(self, positions_t: Tensor) -> Tensor:
        """Cosine and sine of each token, [t, 2, R], for all layers."""
        angles_tR = positions_t[:, None].float() * self._angles_R
        return torch.stack([angles_tR.cos(), angles_tR.sin()], 1) * self._scale


class PackedRow(NamedTuple):
    """The sequences of a row, for every layer.

    ends: of the unsharded row. rotations: of this rank's tokens, by their positions in their sequences, see
    `Rotation.of`. routed: what may choose the experts of this rank's tokens.
    """

    ends: Ends
    rotations: Mapping[Rotary, Tensor]
    routed: RoutedRow | None = None

    def params(self) -> PackedSeqParams:
        """The form in which Megatron passes it to the layers."""
        bounds, longest = self.ends.bounds, self.ends.longest
        params = PackedSeqParams("thd", bounds, bounds, None, None, longest, longest)
        params.row = self
        return params


def _rotated(heads_tHD: Tensor, rotation_t2R: Tensor, pairs: bool) -> Tensor:
    """The first R channels of each head, rotated: neighbouring channels (pairs), or those of two halves."""
    channels = rotation_t2R.shape[-1]
    turned, rest = heads_tHD[..., :channels], heads_tHD[..., channels:]
    if pairs:
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        across = torch.cat((-second, first), -1)
    cos_t1R, sin_t1R = rotation_t2R.to(turned.dtype).split(1, 1)
    return torch.cat((turned * cos_t1R + across * sin_t1R, rest), -1)


class Norms(NamedTuple):
    """The norms of queries and keys: a weight for each channel of a head, [D], or of all of them, [H, D].

    squares: of norms over all heads together, the mean squares of queries and of keys, [t, 1, 2]. from_zero:
    see `scaled`.
    """

    query: Tensor
    key: Tensor
    eps: float
    squares: Tensor | None = None
    from_zero: bool = False

    def normed(self, query_tHD: Tensor, key_tGD: Tensor) -> tuple[Tensor, Tensor]:
        """Both, in the dtype of the weights."""
        query_square, key_square = (None, None) if self.squares is None else self.squares.split(1, -1)
        return (
            self._normed(query_tHD.float(), self.query, query_square),
            self._normed(key_tGD.float(), self.key, key_square),
        )

    def _normed(self, heads: Tensor, weight: Tensor, square: Tensor | None) -> Tensor:
        if square is None:
            normed = rms_norm(heads, heads.shape[-1:], eps=self.eps)
        else:
            normed = heads * (square + self.eps).rsqrt()
        return scaled(normed, weight, from_zero=self.from_zero)


class ShardedWeights(nn.Module):
    """The weights of a norm over all heads: those of this tensor rank's heads."""

    def __init__(self, config: TransformerConfig, heads: int) -> None:
        super().__init__()
        number = heads * config.kv_channels // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(number, dtype=config.params_dtype))


@fused
def _heads_of(
    mixed_tGC: Tensor, rotation_t2R: Tensor, norms: Norms | None, channels: int, pairs: bool, gates: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [t, H, D] and keys, and values, [t, G, D]; the heads of a group lie together in C.

    gates: behind each query lies a gate.
    """
    per_group = mixed_tGC.shape[-1] - 2 * channels
    query, key, value = mixed_tGC.split([per_group, channels, channels], -1)
    query = query.reshape(len(mixed_tGC), -1, 2 * channels if gates else channels)[..., :channels]
    if norms is not None:
        query, key = norms.normed(query, key)
    return _rotated(query, rotation_t2R, pairs), _rotated(key, rotation_t2R, pairs), value.contiguous()


@fused
def _gated(attended_t1C: Tensor, mixed_tGC: Tensor, channels: int) -> Tensor:
    """What each head attended to, times the sigmoid of its gate."""
    gates: Tensor = mixed_tGC[..., : -2 * channels].unflatten(-1, (-1, 2, channels))[..., 1, :]
    return attended_t1C * gates.reshape(attended_t1C.shape).sigmoid()


class CoreAttention(nn.Module):
    """Causal attention inside each sequence of a packed row, between the matrices of a layer.

    Megatron's own would read the lengths of the sequences back from the GPU in every layer. Under context
    parallelism every rank has two pieces of each sequence, one from either end (so that all have the same
    load). Its queries attend to the gathered keys and values of all ranks. scale: of the scores. sinks: see
    `Scoring`; of this rank's heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerAttention,
        scale: float | None,
        *,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self._rotary = layer.rotary
        self._scores = Scoring(scale, layer.window)
        self.sinks: nn.Parameter | None = None
        if has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self._kernel = fastest(compute_device(), config.params_dtype, has_sinks=has_sinks)
        self._recomputes = recomputes_attention(config)

    def attended(self, ends: Ends, *heads: Tensor) -> Tensor:
        """Queries [t, H, D], keys and values -> [t, 1, H x D]."""
        attend = partial(self._attended, ends)
        attended = checkpoint(attend, False, *heads) if self._recomputes and self.training else attend(*heads)
        return attended.reshape(len(attended), 1, -1)

    def _attended(self, ends: Ends, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[t, H, D] -> [t, H, D]."""
        ranks, rank = get_context_parallel_world_size(), get_context_parallel_rank()
        scores = self._scores._replace(sinks=self.sinks)
        if ranks == 1:
            return self._kernel.attend(query, key, value, Sides(ends, ends), scores)
        sides, indices = _context_sides(ends.lengths, ranks, rank, query.device)
        key, value = (
            gather_from_sequence_parallel_region(x, group=get_context_parallel_group()).index_select(
                0, indices
            )
            for x in (key, value)
        )
        return self._kernel.attend(query, key, value, sides, scores)


class Attention(CoreAttention):
    """Attention of heads whose queries, keys and values are one matrix; what lies between is two kernels."""

    def __init__(self, config: TransformerConfig, family: Family, layer: LayerAttention, **_: object) -> None:
        super().__init__(config, layer, config.softmax_scale, has_sinks=family.has_sinks)
        self._channels = config.kv_channels
        self._groups = config.num_query_groups // config.tensor_model_parallel_size
        self._pairs = config.rotary_interleaved
        self._eps, self._from_zero = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self._has_gates = family.gates_attention
        queries = config.num_attention_heads * config.kv_channels
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            queries * (1 + self._has_gates) + 2 * config.num_query_groups * config.kv_channels,
            config=config,
            init_method=config.init_method,
            bias=config.add_qkv_bias,
            gather_output=False,
        )
        row = NormedRow if family.sandwich else RowParallelLinear
        settings = row_settings(config, bias=family.has_biases and config.add_qkv_bias)
        self.linear_proj = row(queries, config.hidden_size, config=config, **settings)
        self._heads = (config.num_attention_heads, config.num_query_groups)
        self.q_layernorm: RMSNorm | ShardedWeights | None = None
        self.k_layernorm: RMSNorm | ShardedWeights | None = None
        self._norms_all_heads = family.norms_all_heads
        if family.norms_all_heads:
            self.q_layernorm, self.k_layernorm = (ShardedWeights(config, heads) for heads in self._heads)
        elif family.settings.get("qk_layernorm"):
            self.q_layernorm, self.k_layernorm = (
                RMSNorm(config, self._channels, self._eps) for _ in self._heads
            )

    def forward(
        self,
        hidden_states: Tensor,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, width] -> [t, 1, width], and a bias, if it has one."""
        row: PackedRow = packed_seq_params.row
        mixed, _no_bias = self.linear_qkv(hidden_states)
        mixed = mixed.view(len(mixed), self._groups, -1)
        rotation_t2R = row.rotations[self._rotary]
        norms = self._norms(mixed)
        heads = _heads_of(mixed, rotation_t2R, norms, self._channels, self._pairs, self._has_gates)
        attended = self.attended(row.ends, *heads)
        if self._has_gates:
            attended = _gated(attended, mixed, self._channels)
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _norms(self, mixed_tGC: Tensor) -> Norms | None:
        if self.q_layernorm is None or self.k_layernorm is None:
            return None
        query, key = self.q_layernorm.weight, self.k_layernorm.weight
        if not self._norms_all_heads:
            return Norms(query, key, self._eps, from_zero=self._from_zero)
        channels = self._channels
        parts = mixed_tGC.float().square().split([mixed_tGC.shape[-1] - 2 * channels, channels, channels], -1)
        means = [part.sum((1, 2)) / (n * channels) for part, n in zip(parts, self._heads, strict=False)]
        own_t2 = torch.stack(means, -1)
        # The sum over ranks, and so is its gradient, since each of them normalises other heads by it.
        squares_t2: Tensor = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(own_t2)
        )
        return Norms(query.view(-1, channels), key.view(-1, channels), self._eps, squares_t2[:, None])


class LatentAttention(CoreAttention):
    """Multi-latent attention: keys and values of all heads from one small state of a token.

    A part of each head's channels has positions; the keys of that part are the same in all
    heads. Queries may come from a small state, too.
    """

    def __init__(self, config: TransformerConfig, latent: Latent, layer: LayerAttention, **_: object) -> None:
        super().__init__(config, layer, latent.scale)
        self._latent, self._pairs = latent, config.rotary_interleaved
        self._gathers = config.sequence_parallel
        self._heads = config.num_attention_heads // config.tensor_model_parallel_size
        heads, inner = config.num_attention_heads, latent.positioned + latent.other
        columns = {"config": config, "init_method": config.init_method, "bias": False, "gather_output": False}
        small = latent.keys_and_values
        if latent.queries:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, latent.queries)
            self.q_layernorm = RMSNorm(config, latent.queries)
        width = latent.queries or config.hidden_size
        queries = ColumnParallelLinear(width, heads * inner, **columns)
        # Megatron's names.
        self.linear_q_up_proj: nn.Module | None = queries if latent.queries else None
        self.linear_q_proj: nn.Module | None = None if latent.queries else queries
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, small + latent.positioned)
        self.kv_layernorm = RMSNorm(config, small)
        self.linear_kv_up_proj = ColumnParallelLinear(small, heads * (latent.other + latent.value), **columns)
        self.linear_proj = RowParallelLinear(
            heads * latent.value, config.hidden_size, config=config, **row_settings(config)
        )

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSeqParams, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """[t, 1, width] -> [t, 1, width], and no bias."""
        row: PackedRow = packed_seq_params.row
        sizes = self._latent
        if self.linear_q_up_proj is not None:
            query, _no_bias = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        elif self.linear_q_proj is not None:
            query, _no_bias = self.linear_q_proj(hidden_states)
        small, positioned = self.linear_kv_down_proj(hidden_states).split(
            [sizes.keys_and_values, sizes.positioned], -1
        )
        pair, _no_bias = self.linear_kv_up_proj(self.kv_layernorm(small))
        if self._gathers:
            positioned = gather_from_sequence_parallel_region(positioned)
        query, pair = (x.view(len(x), self._heads, -1) for x in (query, pair))
        plain, rotated = query.split([sizes.other, sizes.positioned], -1)
        key, value = pair.split([sizes.other, sizes.value], -1)
        rotation_t2R = row.rotations[self._rotary]
        positioned = _rotated(positioned, rotation_t2R, self._pairs).expand(-1, self._heads, -1)
        heads = (
            torch.cat([plain, _rotated(rotated, rotation_t2R, self._pairs)], -1),
            torch.cat([key, positioned], -1),
            value,
        )
        # Not every kernel takes values of another width than that of queries and keys.
        width = max(sizes.value, sizes.other + sizes.positioned)
        attended = self.attended(row.ends, *(pad(head, (0, width - head.shape[-1])) for head in heads))
        values = attended.view(len(attended), 1, self._heads, -1)[..., : sizes.value]
        output: tuple[Tensor, Tensor | None] = self.linear_proj(values.flatten(2))
        return output


# All layers of a model, and both passes, use the same rows.
@lru_cache(maxsize=64)
def _context_sides(
    lengths: tuple[int, ...], ranks: int, rank: int, device: torch.device
) -> tuple[Sides, Tensor]:
    """The sides of a context rank's queries, piece by piece, and the indices of their keys when gathered.

    A piece attends to all pieces before it, and to itself.
    """
    queries: list[int] = []
    keys: list[int] = []
    indices = []
    places, start = gathered_places(lengths, ranks), 0
    for length in lengths:
        size = length // (2 * ranks)
        for piece in (rank, 2 * ranks - 1 - rank):
            queries.append(size)
            keys.append((piece + 1) * size)
            indices.append(places[start : start + (piece + 1) * size])
        start += length
    sides = Sides(Ends.of(queries, device), Ends.of(keys, device))
    return sides, to_device(np.concatenate(indices), device)


def _residual_added(_is_training: bool, _is_fused: bool) -> Callable[..., Tensor]:
    """Megatron's form of it; its own also drops out a share of 0, with a kernel and a mask for it."""
    return _added


def _added(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _dropout: float) -> Tensor:
    output, bias = output_with_bias
    return residual.to(output.dtype) + (output if bias is None else output + bias)


def number_experts(layer: nn.Module, shape: Shape, number: int) -> None:
    """Have a layer's experts know which layer they are, and before each pass which row comes."""
    if isinstance(layer.mlp, MoE):
        layer.mlp.layer = shape.expert_layers.numbers.index(number)
        layer.register_forward_pre_hook(_tell_experts, with_kwargs=True)


def _tell_experts(layer: nn.Module, _states: object, options: Mapping[str, object]) -> None:
    """Tell a layer's experts which row comes, also where the layer is recomputed after other rows."""
    params = options["packed_seq_params"]
    assert isinstance(params, PackedSeqParams)
    if isinstance(layer.mlp, MoE):
        layer.mlp.row = params.row.routed


class _Built(NamedTuple):
    """What Megatron makes a module of; of its own `ModuleSpec` it warns that it does not know the module."""

    module: type[nn.Module]
    params: Mapping[str, object]


def layer_spec(shape: Shape, number: int) -> ModuleSpec:
    """One layer of a model. number: over all stages; those that predict further ahead come last."""
    family, latent = shape.family, shape.latent
    params = {"layer": shape.attention_at(number)}
    attention = ModuleSpec(module=Attention, params={"family": family, **params})
    if latent is not None:
        attention = ModuleSpec(module=LatentAttention, params={"latent": latent, **params})
    if shape.attention_at(number).is_linear:
        attention = ModuleSpec(module=DeltaNet, params={"delta": shape.delta})
    mlp = _Built(NormedMLP if family.sandwich else GatedMLP, {"gate": shape.gate})
    if shape.has_experts(number):
        mlp = _Built(MoE, {"gate": shape.gate, "has_bias": family.has_biases})
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=_residual_added,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=_residual_added,
        ),
    )
