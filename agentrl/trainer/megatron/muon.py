"""Muon over matrices that ranks share: each is gathered for its update, one at a time.

The means stay sharded as AdamW's are. Every rank of a stage orthogonalizes every matrix of it, as the torch
trainer's ranks do: those of the checkpoint, queries, keys and values for themselves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn

from agentrl.trainer.elsewhere import MOMENTUM
from agentrl.trainer.megatron.model.network import Network, Piece
from agentrl.trainer.megatron.model.rules import Dims, Qkv, Rule, Run, Same
from agentrl.trainer.megatron.state import is_hidden_matrix, main_of, start_of

_MOMENTUM = 0.95
"""Decay of the mean of gradients: torch's."""


@torch.no_grad()
def step_matrices(optimizer: MegatronOptimizer, network: Network, *, lr: float, weight_decay: float) -> None:
    """A step over the hidden matrices, whose gradients are taken: the optimizer leaves them as they are.

    Every rank of the stage calls it.
    """
    for piece in network.pieces():
        if not (piece.parameter.requires_grad and is_hidden_matrix(piece)):
            continue
        main = main_of(optimizer, piece.parameter)
        start = 0 if main is None else start_of(optimizer, piece.parameter)
        direction = torch.zeros(piece.parameter.numel(), device=piece.parameter.device)
        if main is not None:
            direction[start : start + main.numel()] = _direction(optimizer, main)
        if isinstance(optimizer, DistributedOptimizer):
            # A replica's ranks have a run of it each; the rest of theirs is 0.
            dist.all_reduce(direction, group=optimizer.data_parallel_group)
        change = _orthogonalized(network, piece, direction, lr)
        if main is not None:
            main.mul_(1 - lr * weight_decay)
            main.view(-1).add_(change[start : start + main.numel()])
            main.grad = None


def _direction(optimizer: MegatronOptimizer, main: Tensor) -> Tensor:
    """The mean of its gradients, one step ahead (Nesterov): of this rank's part, flat."""
    gradient = main.grad
    assert gradient is not None, "each part has one"
    state = optimizer.optimizer.state[main]
    if MOMENTUM not in state:
        state[MOMENTUM] = torch.zeros_like(main)
    mean: Tensor = state[MOMENTUM].lerp_(gradient, 1 - _MOMENTUM)
    return gradient.lerp(mean, _MOMENTUM).view(-1)


def _orthogonalized(network: Network, piece: Piece, direction: Tensor, lr: float) -> Tensor:
    """What is added to this tensor rank's shard, flat. direction: of the same shard."""
    rule, dims = piece.placed.rule, network.shape.dims(network.layout.tensor_model_parallel_size)
    changes = []
    for matrix in _matrices(network, piece, direction.view(piece.parameter.shape)):
        whole = nn.Parameter(torch.zeros_like(matrix))
        whole.grad = matrix
        # This scaling gives an update the size of AdamW's, so that both share one learning rate.
        torch.optim.Muon(
            [whole], lr=lr, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
        changes.append(whole.detach())
    shards = rule.cut(rule.join(changes, dims), network.layout.tensor_model_parallel_size)
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return shards[rank].reshape(-1)


def _matrices(network: Network, piece: Piece, shard: Tensor) -> list[Tensor]:
    """The checkpoint's matrices that the tensor ranks' shards make together."""
    ranks, rule = network.layout.tensor_model_parallel_size, piece.placed.rule
    shards = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    dims = network.shape.dims(ranks)
    matrices = [shard.new_empty(shape) for shape in _shapes(rule, shard, ranks, dims)]
    for number, part in enumerate(shards):
        rule.unshard(part, Run(number, ranks), matrices, dims)
    return matrices


def _shapes(rule: Rule, shard: Tensor, ranks: int, dims: Dims) -> list[tuple[int, int]]:
    """Of the checkpoint's matrices. ranks: those that have such a shard each."""
    rows, columns = shard.shape
    if isinstance(rule, Same):
        return [(rows, columns * ranks) if rule.along else (rows * ranks, columns)]
    if isinstance(rule, Qkv):
        keys = dims.query_groups * dims.kv_channels
        return [(keys * dims.heads_per_group, columns), (keys, columns), (keys, columns)]
    return [(rows * ranks // len(rule.hf), columns)] * len(rule.hf)
