"""The layers that Megatron is given in place of its own: they run on a CPU and a GPU alike.

T: tokens of a packed row on this rank. H: heads, D: channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.model.families import Family
from agentrl.trainer.megatron.model.kernels import Ends, fastest
from agentrl.trainer.megatron.model.rows import pieces_of


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, as Hugging Face's models have it; also under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank sees a part of the sequence: Megatron adds the gradients up where this mark stands.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape, over its last dimension."""
        normed = rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return self.weight * normed.to(hidden.dtype)


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed row.

    Under context parallelism every rank has two pieces of each, one from either end (so that all have as much
    to do), asks with their queries, and sees the keys and values of all ranks, in one call a sequence.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        self.config = config
        self.scale = softmax_scale
        self.kernel = fastest(here(), config.params_dtype)

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
        bounds = packed_seq_params.cu_seqlens_q
        ranks, rank = get_context_parallel_world_size(), get_context_parallel_rank()
        if ranks == 1:
            ends = Ends(bounds, packed_seq_params.max_seqlen_q)
            return self.kernel.attend(query, key, value, ends, self.scale).flatten(1)
        lengths = [stop - start for start, stop in pairwise(bounds.tolist())]
        key, value = (_of_all_ranks(x, lengths, ranks) for x in (key, value))
        queries = query.split([length // ranks for length in lengths])
        outputs = [
            self._attend(q, k, v, _seen(len(k), ranks, rank, q.device))
            for q, k, v in zip(queries, key.split(lengths), value.split(lengths), strict=True)
        ]
        return torch.cat(outputs).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        shared = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=shared)
        return out[0].transpose(0, 1)


def _of_all_ranks(mine: Tensor, lengths: Sequence[int], ranks: int) -> Tensor:
    """Every rank's pieces of all sequences, in the sequences' order; gradients flow back to each rank."""
    gathered = gather_from_sequence_parallel_region(mine, group=get_context_parallel_group())
    per_rank = gathered.chunk(ranks)
    wholes = []
    for parts in zip(*(x.split([length // ranks for length in lengths]) for x in per_rank), strict=True):
        halves = [part.chunk(2) for part in parts]
        wholes += [first for first, _ in halves] + [last for _, last in reversed(halves)]
    return torch.cat(wholes)


def _seen(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """[tokens on this rank, length]: which tokens each of this rank's may look at."""
    mine = torch.from_numpy(pieces_of(length, ranks, rank)).to(device)
    return mine[:, None] >= torch.arange(length, device=device)


class NormedRow(nn.Module):
    """A row-parallel layer whose output is normalised before it is added to the residual."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **how: object
    ) -> None:
        super().__init__()
        self.linear = RowParallelLinear(input_size, output_size, config=config, **how)
        self.norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The output, and no bias: these families have none there."""
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
