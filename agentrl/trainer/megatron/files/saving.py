"""What one rank writes of a network that learns, and reads again: its shards, and its optimizer's parts.

The optimizer's means are written part by part, since Megatron's own way back fails with torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl.checkpoints.tensors import open_tensors
from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.files.sharded import file_of, rank_folder, write_shards
from agentrl.trainer.megatron.learner import Learner
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.state import Part
from agentrl.trainer.plan import Done
from agentrl.weights import manifest_of
from agentrl.weights.codec import bytes_of
from agentrl.weights.streamed import SafetensorsFile


@torch.no_grad()
def write(folder: Path, learner: Learner) -> None:
    """Write what no rank before this one writes."""
    network = learner.passes.network
    first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    if first_replica:
        write_shards(folder, parallel_state.get_tensor_model_parallel_rank(), dict(_shards(network)))
    if first_replica or network.layout.shares_the_optimizer:
        path = _path(folder, dist.get_rank())
        path.parent.mkdir(exist_ok=True)
        named = [one for part in learner.optimizer.parts() for one in _named(part)]
        manifest = manifest_of(named)
        with SafetensorsFile(path, manifest) as file:
            for spec, (_, tensor) in zip(manifest, named, strict=True):
                file.put(spec, bytes_of(tensor))


@torch.no_grad()
def read(folder: Path, learner: Learner, done: Done) -> None:
    """Have parameters and optimizer be what they were.

    Raises:
        ModelLoadError: a file is missing, cut short, or of another model.
    """
    network = learner.passes.network
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, group in groupby(network.pieces(), lambda piece: file_of(piece.placed)):
        path = rank_folder(folder, tensor_rank) / name
        with open_tensors(path) as opened:
            for placed, parameter in group:
                _fill(parameter, opened.get_tensor(placed.megatron), path)
    path = _path(folder, _owner(network))
    with open_tensors(path) as opened:
        for part in learner.optimizer.resume(done):
            for name, tensor in _named(part):
                _fill(tensor, opened.get_tensor(name), path)


def _shards(network: Network) -> Iterator[tuple[Placed, Tensor]]:
    """Not the copy of a tied embedding that the last stage of a pipeline has: the first one writes it."""
    first = parallel_state.is_pipeline_first_stage()
    for placed, parameter in network.pieces():
        if first or not placed.rule.megatron.startswith("embedding."):
            yield placed, parameter.detach()


def _named(part: Part) -> Iterator[tuple[str, Tensor]]:
    if part.is_copy:
        yield f"{part.name}.main", part.main
    for name, moment in part.moments.items():
        yield f"{part.name}.{name}", moment


def _owner(network: Network) -> int:
    """The rank whose file says what this one keeps: its own, or that of its first replica."""
    if network.layout.shares_the_optimizer:
        return dist.get_rank()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dist.get_process_group_ranks(group)[0]


def _path(folder: Path, rank: int) -> Path:
    return folder / "optimizer" / f"rank-{rank:05d}.safetensors"


def _fill(tensor: Tensor, saved: Tensor, path: Path) -> None:
    if saved.shape != tensor.shape:
        raise ModelLoadError(
            f"{path} holds {list(saved.shape)} values where this rank has {list(tensor.shape)}; it is of "
            "another model."
        )
    tensor.copy_(saved)
