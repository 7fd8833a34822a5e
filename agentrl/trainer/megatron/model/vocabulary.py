"""The layer over the vocabulary where every tensor rank holds a part of it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from torch import Tensor

from agentrl.losses import HeadRanks, OutputHead


def head_shard(weight_VD: Tensor, vocab: int) -> OutputHead:
    """This rank's rows of the head. vocab: the ids of all ranks; rows beyond are padding."""
    return OutputHead(weight_VD, first=get_tensor_model_parallel_rank() * len(weight_VD), vocab=vocab)


def head_ranks() -> HeadRanks | None:
    """The tensor ranks, which share a vocabulary; None where one has all of it."""
    if get_tensor_model_parallel_world_size() == 1:
        return None
    return HeadRanks(_largest, _total)


@torch.no_grad()
def _largest(values_N: Tensor) -> Tensor:
    dist.all_reduce(values_N, dist.ReduceOp.MAX, group=get_tensor_model_parallel_group())
    return values_N


@torch.no_grad()
def _total(values: Tensor) -> Tensor:
    dist.all_reduce(values, group=get_tensor_model_parallel_group())
    return values
