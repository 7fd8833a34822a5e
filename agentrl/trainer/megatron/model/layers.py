"""Layers in place of Megatron's own, which run on a GPU only: these run on a CPU, too.

T: tokens of a packed row on this rank. H: heads, D: channels of a head.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.model.families import Family
from agentrl.trainer.megatron.model.kernels import Ends, Sides, fastest
from agentrl.trainer.megatron.model.rows import pieces_of


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, as in Hugging Face's models; also under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank has a part of the sequence: Megatron sums the gradients of parameters with this mark.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape, over its last dimension."""
        normed = rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return self.weight * normed.to(hidden.dtype)


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed row.

    Under context parallelism every rank has two pieces of each sequence, one from either end (so that all
    have the same load). Its queries attend to the gathered keys and values of all ranks.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale
        self.kernel = fastest(compute_device(), config.params_dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """[T, H, D] -> [T, H x D]."""
        if packed_seq_params is None:
            raise ValueError("attention needs the lengths of the packed sequences")
        ranks, rank = get_context_parallel_world_size(), get_context_parallel_rank()
        if ranks == 1:
            ends = Ends(packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q)
            return self.kernel.attend(query, key, value, Sides(ends, ends), self.scale).flatten(1)
        sides, indices = _context_sides(packed_seq_params.bounds, ranks, rank, query.device)
        key, value = (
            gather_from_sequence_parallel_region(x, group=get_context_parallel_group()).index_select(
                0, indices
            )
            for x in (key, value)
        )
        return self.kernel.attend(query, key, value, sides, self.scale).flatten(1)


# All layers of a model, and both passes, use the same rows.
@lru_cache(maxsize=64)
def _context_sides(
    bounds: tuple[int, ...], ranks: int, rank: int, device: torch.device
) -> tuple[Sides, Tensor]:
    """The sides of a context rank's queries, piece by piece, and the indices of their keys when gathered.

    A piece attends to all pieces before it, and to itself.
    """
    queries, keys, indices = [0], [0], []
    for start, stop in pairwise(bounds):
        size = (stop - start) // (2 * ranks)
        # From the order of the sequence to that of the gathered ranks, each with its own part of the row.
        positions = np.concatenate([pieces_of(stop - start, ranks, other) for other in range(ranks)])
        gathered = np.repeat(np.arange(ranks) * bounds[-1] // ranks, 2 * size)
        gathered += start // ranks + np.tile(np.arange(2 * size), ranks)
        index_of = np.empty_like(gathered)
        index_of[positions] = gathered
        for piece in (rank, 2 * ranks - 1 - rank):
            queries.append(queries[-1] + size)
            keys.append(keys[-1] + (piece + 1) * size)
            indices.append(index_of[: (piece + 1) * size])
    sides = Sides(*(_ends(ends, device) for ends in (queries, keys)))
    return sides, torch.from_numpy(np.concatenate(indices)).to(device)


def _ends(bounds: list[int], device: torch.device) -> Ends:
    return Ends(torch.tensor(bounds, dtype=torch.int32, device=device), int(np.diff(bounds).max()))


class NormedRow(nn.Module):
    """A row-parallel layer whose output is normalised before it is added to the residual."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
    ) -> None:
        super().__init__()
        self.linear = RowParallelLinear(input_size, output_size, config=config, **kwargs)
        self.norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The output, and no bias: these families have none in this layer."""
        output, _ = self.linear(hidden)
        return self.norm(output), None


def layer_spec(family: Family) -> ModuleSpec:
    """One layer of a family."""
    row = NormedRow if family.sandwich else RowParallelLinear
    norm = RMSNorm if family.settings.get("qk_layernorm") else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=row,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=row))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
