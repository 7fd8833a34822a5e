"""What an optimizer of Megatron's keeps of each parameter on this rank, whichever of its optimizers it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from agentrl.trainer.megatron.model.network import Piece

MOMENTS = ("exp_avg", "exp_avg_sq")


class Part(NamedTuple):
    """The part of a parameter that this rank steps with; all of it without the distributed optimizer.

    main: its values, in fp32 and flat; is_copy: the parameter has them in half precision. moments: AdamW's
    means by name, as flat; none before the first step.
    """

    name: str
    main: Tensor
    is_copy: bool
    moments: dict[str, Tensor]


def parts_of(optimizer: ChainedOptimizer, pieces: Iterable[Piece]) -> Iterator[Part]:
    """In the order of the layers; other ranks have the rest."""
    (only,) = optimizer.chained_optimizers
    for piece in pieces:
        main = _main_of(only, piece.parameter)
        if main is not None:
            state = only.optimizer.state.get(main, {})
            moments = {name: state[name].view(-1) for name in MOMENTS if name in state}
            is_copy = main.dtype != piece.parameter.dtype
            yield Part(piece.placed.megatron, main.detach().view(-1), is_copy, moments)


def begin_moments(optimizer: ChainedOptimizer, pieces: Iterable[Piece], *, steps: int) -> None:
    """Room for the means of every part, as after so many steps; what is in it is to be written."""
    (only,) = optimizer.chained_optimizers
    only.optimizer.state.clear()
    for group in only.optimizer.param_groups:
        # Transformer Engine's and Apex's, which Megatron takes where they are installed, count here.
        group["step"] = steps
    for piece in pieces if steps else ():
        main = _main_of(only, piece.parameter)
        if main is not None:
            moments = {name: torch.zeros_like(main) for name in MOMENTS}
            only.optimizer.state[main] = {"step": torch.tensor(float(steps), device=main.device), **moments}


def _main_of(optimizer: nn.Module, parameter: nn.Parameter) -> Tensor | None:
    """What the inner optimizer steps for a parameter; None where that is another rank's."""
    if not isinstance(optimizer, DistributedOptimizer):
        # bf16 parameters know their copy in fp32; the others are what is stepped.
        main: Tensor = getattr(parameter, "main_param", parameter)
        return main
    at = optimizer.model_param_group_index_map.get(parameter)
    if at is None:
        return None
    group, order = at
    found: Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return found
