"""Weights of all ranks, one parameter after the other, as a checkpoint's tensors on rank 0."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.families import Placed, rules_of
from agentrl.trainer.megatron.network import Network

# Shards of a matrix, one behind the other.
_DIMENSIONS = 3


@torch.no_grad()
def gathered(network: Network) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its Hugging Face name; every rank calls it, rank 0 alone is given them.

    One parameter at a time: no rank ever holds more than that beside its own part.
    """
    layout, shape = network.layout, network.shape
    dims = shape.dims(layout.tensor_model_parallel_size)
    mine = {piece.placed: piece.parameter for piece in network.pieces()}
    for placed in rules_of(shape.family, int(shape.sizes["num_layers"]), tied=shape.tied):
        shards = _shards(mine.get(placed), _stage_of(placed, network), network.config.params_dtype)
        if shards is not None:
            whole = placed.rule.glue(shards)
            yield from zip(placed.hf, placed.rule.part(whole, dims), strict=True)


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that has a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = ranks * network.layout.num_virtual_stages_per_pipeline_rank
    return placed.layer // (int(network.shape.sizes["num_layers"]) // stages) % ranks


def _shards(mine: Tensor | None, stage: int, dtype: torch.dtype) -> list[Tensor] | None:
    """The shards of a parameter that pipeline rank `stage` has, on rank 0; elsewhere None."""
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    shards: list[Tensor] | None = None
    if parallel_state.get_pipeline_model_parallel_rank() == stage and first_replica:
        if mine is None:
            raise KeyError("a parameter is not on the rank that the layout puts it on")
        count = parallel_state.get_tensor_model_parallel_world_size()
        shards = [torch.empty_like(mine) for _ in range(count)]
        dist.all_gather(shards, mine.detach(), group=parallel_state.get_tensor_model_parallel_group())
    source = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())[stage]
    if dist.get_rank() == 0:
        return shards if source == 0 else _received(source, dtype)
    if shards is not None and source != 0 and parallel_state.get_tensor_model_parallel_rank() == 0:
        _send(shards)
    return None


def _send(shards: list[Tensor]) -> None:
    stacked = torch.stack(shards)
    shape = torch.zeros(_DIMENSIONS, dtype=torch.int64, device=stacked.device)
    shape[: stacked.dim()] = torch.tensor(stacked.shape)
    dist.send(shape, 0)
    dist.send(stacked, 0)


def _received(source: int, dtype: torch.dtype) -> list[Tensor]:
    shape = torch.zeros(_DIMENSIONS, dtype=torch.int64, device=here())
    dist.recv(shape, source)
    stacked = torch.empty([size for size in shape.tolist() if size], dtype=dtype, device=here())
    dist.recv(stacked, source)
    return list(stacked)
