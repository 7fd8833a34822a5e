"""The state of a Megatron optimizer for each parameter on this rank, whichever of its optimizers it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor, nn

from agentrl.trainer.elsewhere import MOMENTS, MOMENTUM
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network, Piece
from agentrl.trainer.megatron.model.rules import Dims, KeyHeads, Qkv, Rule, Run, Same, unshard
from agentrl.trainer.offload import CpuAdamW


class StatePart(NamedTuple):
    """The part of a parameter that this rank updates; all of it without the distributed optimizer.

    start: its place in this tensor rank's flat shard. main: its values, in fp32 and flat; is_copy: the
    parameter itself has half precision. moments: AdamW's means, or Muon's, by name, flat, too; none before
    the first step.
    """

    placed: Placed
    start: int
    main: Tensor
    is_copy: bool
    moments: dict[str, Tensor]


def parts_of(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> Iterator[StatePart]:
    """This rank's parts, in the order of the layers."""
    for piece, owner in _updated(optimizer, pieces):
        main = main_of(owner, piece.parameter)
        if main is not None:
            state = owner.optimizer.state.get(main, {})
            moments = {name: state[name].view(-1) for name in (*MOMENTS, MOMENTUM) if name in state}
            is_copy = main.dtype != piece.parameter.dtype
            start = start_of(owner, piece.parameter)
            values = owner.optimizer.copies[main] if isinstance(owner.optimizer, CpuAdamW) else main
            yield StatePart(piece.placed, start, values.detach().view(-1), is_copy, moments)


def begin_moments(
    optimizer: ChainedOptimizer, pieces: Iterable[Piece], *, steps: int, has_muon: bool
) -> None:
    """Allocate the moments of every part, as after `steps` steps; the caller fills them."""
    for chained in optimizer.chained_optimizers:
        if chained.is_stub_optimizer:
            continue
        chained.optimizer.state.clear()
        if isinstance(chained.optimizer, CpuAdamW):
            chained.optimizer.refresh()
        for group in chained.optimizer.param_groups:
            # The optimizers of Transformer Engine and Apex, which Megatron prefers where they are installed,
            # count their steps here.
            group["step"] = steps
    for piece, owner in _updated(optimizer, pieces if steps else ()):
        main = main_of(owner, piece.parameter)
        if main is not None and has_muon and is_hidden_matrix(piece):
            owner.optimizer.state[main] = {MOMENTUM: torch.zeros_like(main)}
        elif main is not None and isinstance(owner.optimizer, CpuAdamW):
            owner.optimizer.begin(main, steps=steps)
        elif main is not None:
            moments = {name: torch.zeros_like(main) for name in MOMENTS}
            owner.optimizer.state[main] = {"step": torch.tensor(float(steps), device=main.device), **moments}


def _updated(
    optimizer: ChainedOptimizer, pieces: Iterable[Piece]
) -> Iterator[tuple[Piece, MegatronOptimizer]]:
    """The parameters that learn, each with its optimizer: experts have one of their own, the last."""
    for piece in pieces:
        if piece.parameter.requires_grad:
            yield piece, optimizer.chained_optimizers[0 if piece.placed.expert is None else -1]


def mains_of(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> list[Tensor]:
    """What the inner optimizers update for some parameters, of those that this rank updates."""
    mains = [main_of(owner, piece.parameter) for piece, owner in _updated(optimizer, pieces)]
    return [main for main in mains if main is not None]


def move_to_cpu(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> None:
    """Have AdamW's state in the CPU's memory; of parameters in half precision, their copies in fp32, too."""
    written: dict[MegatronOptimizer, dict[Tensor, Tensor]] = {}
    for piece, owner in _updated(optimizer, pieces):
        own, main = written.setdefault(owner, {}), main_of(owner, piece.parameter)
        if main is not None and main.dtype != piece.parameter.dtype:
            start = start_of(owner, piece.parameter)
            own[main] = piece.parameter.detach().view(-1)[start : start + main.numel()].view(main.shape)
    for owner, own in written.items():
        owner.optimizer = CpuAdamW(owner.optimizer.param_groups, own)
        # The step has written them.
        owner._copy_main_params_to_model_params = lambda: None


def is_hidden_matrix(piece: Piece) -> bool:
    """Whether it is a matrix between the embedding and the head, which Muon optimizes."""
    return piece.placed.layer is not None and piece.parameter.ndim == 2


def start_of(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> int:
    """The place of this rank's part in the flat parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        return 0
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def main_of(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> Tensor | None:
    """The tensor that the inner optimizer updates for a parameter; None where another rank has it.

    None, too, where it does not learn.
    """
    if not parameter.requires_grad:
        return None
    if not isinstance(optimizer, DistributedOptimizer):
        # bf16 parameters refer to their copy in fp32; others are updated themselves.
        main: Tensor = getattr(parameter, "main_param", parameter)
        return main
    at = optimizer.model_param_group_index_map.get(parameter)
    if at is None:
        return None
    group, order = at
    shard: Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return shard


# Muon over matrices that ranks share: each is gathered for its update, one at a time, and orthogonalized as
# the checkpoint has it. The means stay sharded as AdamW's are.
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
        unshard(rule, part, Run(number, ranks), matrices, dims)
    return matrices


def _shapes(rule: Rule, shard: Tensor, ranks: int, dims: Dims) -> list[tuple[int, int]]:
    """Of the checkpoint's matrices. ranks: those that have such a shard each."""
    rows, columns = shard.shape
    if isinstance(rule, Same):
        return [(rows, columns * ranks) if rule.along else (rows * ranks, columns)]
    if isinstance(rule, Qkv):
        keys = dims.query_groups * dims.kv_channels
        return [(rows * ranks - 2 * keys, columns), (keys, columns), (keys, columns)]
    if isinstance(rule, KeyHeads):
        return [(number, columns) for number in rule.rows(dims)]
    return [(rows * ranks // len(rule.hf), columns)] * len(rule.hf)
