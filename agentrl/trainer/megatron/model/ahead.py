"""Layers that predict tokens further ahead (multi-token prediction), and the loss that they alone have.

As in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, 2.2): the layer of depth k gets, for token i, the state
of depth k - 1 and the embedding of token i + k, and predicts token i + k + 1 through the model's own head.
States of depth 0 are the model's, behind its last norm, as engines give them to these layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import embedding

from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.model.feed_forward import ReplicatedLinear, RMSNorm
from agentrl.trainer.megatron.model.layers import layer_spec
from agentrl.trainer.megatron.model.shape import Shape
from agentrl.types import BoolArray


class AheadLoss(NamedTuple):
    """The loss of these layers in one optimizer step.

    factor: of it in the gradient. by_depth: weight of a token's cross-entropy; the weights of all tokens of
    the step, at all depths, sum to 1.
    """

    factor: float
    by_depth: tuple[float, ...]

    @classmethod
    def of(cls, config: TrainerConfig, masks: Sequence[BoolArray], depths: int) -> AheadLoss:
        """masks: of the predicted tokens of all samples of the step."""
        positions = np.concatenate([np.flatnonzero(mask) for mask in masks])
        counts = [int((positions > k).sum()) for k in range(1, depths + 1)]
        return cls(config.mtp_loss_scaling_factor, tuple(1 / (depths * max(count, 1)) for count in counts))


class AheadLayer(nn.Module):
    """One of them, under Megatron's names."""

    def __init__(self, config: TransformerConfig, shape: Shape, stage: int | None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = RMSNorm(config, width, eps), RMSNorm(config, width, eps)
        self.eh_proj = ReplicatedLinear(config, 2 * width, width)
        # Before the layer: what all tokens go through is in one run of parameters, and experts after it.
        self.final_layernorm = RMSNorm(config, width, eps)
        spec = layer_spec(shape, len(shape.experts_by_layer))
        self.transformer_layer = build_module(spec, config=config, layer_number=1, vp_stage=stage)

    def forward(self, states: Tensor, embedded: Tensor, packed: PackedSeqParams) -> Tensor:
        """[t, 1, width] of both -> the states of the next depth."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(states)], -1)
        states, _ = self.transformer_layer(
            self.eh_proj(joined), attention_mask=None, packed_seq_params=packed
        )
        normed: Tensor = self.final_layernorm(states)
        return normed


class AheadLayers(nn.Module):
    """All of them, on the last stage.

    embedding: this tensor rank's shard of the model's, which does not learn from here; see
    `Network.fetched_embedding`.
    """

    def __init__(self, config: TransformerConfig, shape: Shape, stage: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AheadLayer(config, shape, stage) for _ in range(shape.ahead))
        self._is_sharded = config.sequence_parallel
        self.embedding: Tensor | None = None

    @torch.no_grad()
    def embedded(self, input_ids_t: Tensor) -> Tensor:
        """[t, 1, width], without a gradient; under sequence parallelism this rank's part of t."""
        weight_VD = self.embedding
        assert weight_VD is not None, "it is there in each pass that learns"
        rows_t = input_ids_t - parallel_state.get_tensor_model_parallel_rank() * len(weight_VD)
        is_here_t = (rows_t >= 0) & (rows_t < len(weight_VD))
        own = embedding(rows_t.clamp(0, len(weight_VD) - 1), weight_VD) * is_here_t[:, None]
        gather = (
            reduce_scatter_to_sequence_parallel_region
            if self._is_sharded
            else reduce_from_tensor_model_parallel_region
        )
        summed: Tensor = gather(own[:, None])
        return summed


@torch.no_grad()
def first_stages(weight: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The embedding's shard of the first stage, on the last one; on stages between, None.

    Every rank calls it. weight: on the first stage. like: on the last one, of the same shape.
    """
    if weight is not None:
        shard = weight.detach()
    elif like is not None:
        shard = torch.empty_like(like)
    else:
        return None
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return shard
    first = parallel_state.get_pipeline_model_parallel_first_rank()
    dist.broadcast(shard, first, group=parallel_state.get_embedding_group())
    return shard
