"""The state of a Megatron optimizer for each parameter on this rank, whichever of its optimizers it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from agentrl.trainer.elsewhere import MOMENTS, MOMENTUM
from agentrl.trainer.megatron.model.network import Piece
from agentrl.trainer.offload import CpuAdamW


class StatePart(NamedTuple):
    """The part of a parameter that this rank updates; all of it without the distributed optimizer.

    start: its place in this tensor rank's flat shard. main: its values, in fp32 and flat; is_copy: the
    parameter itself has half precision. moments: AdamW's means, or Muon's, by name, flat, too; none before
    the first step.
    """

    name: str
    start: int
    main: Tensor
    is_copy: bool
    moments: dict[str, Tensor]


def parts_of(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> Iterator[StatePart]:
    """This rank's parts, in the order of the layers."""
    (only,) = optimizer.chained_optimizers
    for piece in pieces:
        main = main_of(only, piece.parameter)
        if main is not None:
            state = only.optimizer.state.get(main, {})
            moments = {name: state[name].view(-1) for name in (*MOMENTS, MOMENTUM) if name in state}
            is_copy = main.dtype != piece.parameter.dtype
            start = start_of(only, piece.parameter)
            values = only.optimizer.copies[main] if isinstance(only.optimizer, CpuAdamW) else main
            yield StatePart(piece.placed.megatron, start, values.detach().view(-1), is_copy, moments)


def begin_moments(
    optimizer: ChainedOptimizer, pieces: Iterable[Piece], *, steps: int, has_muon: bool
) -> None:
    """Allocate the moments of every part, as after `steps` steps; the caller fills them."""
    (only,) = optimizer.chained_optimizers
    if only.is_stub_optimizer:
        return
    only.optimizer.state.clear()
    if isinstance(only.optimizer, CpuAdamW):
        only.optimizer.refresh()
    for group in only.optimizer.param_groups:
        # The optimizers of Transformer Engine and Apex, which Megatron prefers where they are installed,
        # count their steps here.
        group["step"] = steps
    for piece in pieces if steps else ():
        main = main_of(only, piece.parameter)
        if main is not None and has_muon and is_hidden_matrix(piece):
            only.optimizer.state[main] = {MOMENTUM: torch.zeros_like(main)}
        elif main is not None and isinstance(only.optimizer, CpuAdamW):
            only.optimizer.begin(main, steps=steps)
        elif main is not None:
            moments = {name: torch.zeros_like(main) for name in MOMENTS}
            only.optimizer.state[main] = {"step": torch.tensor(float(steps), device=main.device), **moments}


def move_to_cpu(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> None:
    """Have AdamW's state in the CPU's memory; of parameters in half precision, their copies in fp32, too."""
    (only,) = optimizer.chained_optimizers
    if only.is_stub_optimizer:
        return
    written = {}
    for piece in pieces:
        main = main_of(only, piece.parameter)
        if main is not None and main.dtype != piece.parameter.dtype:
            start = start_of(only, piece.parameter)
            written[main] = piece.parameter.detach().view(-1)[start : start + main.numel()].view(main.shape)
    only.optimizer = CpuAdamW(only.optimizer.param_groups, written)
    # The step has written them.
    only._copy_main_params_to_model_params = lambda: None


def is_hidden_matrix(piece: Piece) -> bool:
    """Whether it is a matrix between the embedding and the head, which Muon optimizes."""
    return piece.placed.layer is not None and piece.parameter.ndim == 2


def start_of(optimizer: nn.Module, parameter: nn.Parameter) -> int:
    """The place of this rank's part in the flat parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        return 0
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def main_of(optimizer: nn.Module, parameter: nn.Parameter) -> Tensor | None:
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
