"""The files of one rank for a network that learns: its shards, and its optimizer's parts.

    tensor-0/embedding.safetensors        shards of tensor rank 0, under Megatron's names
    tensor-0/layer-00000.safetensors      a file for each layer, independent of the pipeline stages
    tensor-0/head.safetensors             the last norm, and the head where it is not the embedding
    experts-0/layer-00000.safetensors     shards of the experts, of the ranks that hold a layer's together
    optimizer/rank-00000.safetensors      rank 0's parts of the parameters, flat, with AdamW's means

A parameter that is not sharded is in every tensor rank's files. The optimizer's means are written part by
part, since Megatron's own loading of them fails with torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl.errors import ModelLoadError
from agentrl.trainer.elsewhere import Unsharded
from agentrl.trainer.megatron.files.names import MAIN, rank_file, shard_file
from agentrl.trainer.megatron.learner import MegatronLearner
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.state import StatePart
from agentrl.trainer.plan import Done
from agentrl.weights.codec import bytes_of, manifest_of
from agentrl.weights.hf.opening import open_tensors
from agentrl.weights.streamed import SafetensorsFile


class FileCopy(NamedTuple):
    """What a file will hold: copies of tensors, by name."""

    path: Path
    tensors: Sequence[tuple[str, Tensor]]

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        manifest = manifest_of(self.tensors)
        with SafetensorsFile(self.path, manifest) as file:
            for spec, (_, tensor) in zip(manifest, self.tensors, strict=True):
                file.put(spec, bytes_of(tensor))


@torch.no_grad()
def copies(folder: Path, learner: MegatronLearner, copy: Callable[[Tensor], Tensor]) -> list[FileCopy]:
    """Copies of what this rank's files hold, but those that another replica writes; every rank calls it."""
    learner.passes.gather()
    network = learner.passes.network
    files = shard_copies(folder, network, copy)
    shares = network.layout.shares_the_optimizer
    parts = [part for part in learner.optimizer.parts() if shares or _is_first(part.placed)]
    if parts:
        named = [item for part in parts for item in _named_tensors(part)]
        copied = [(name, copy(tensor)) for name, tensor in named]
        files.append(FileCopy(rank_file(folder, dist.get_rank()), copied))
    return files


@torch.no_grad()
def read(folder: Path, learner: MegatronLearner, done: Done) -> None:
    """Restore parameters and optimizer.

    Raises:
        ModelLoadError: a file is missing, cut short, or of another model.
    """
    network = learner.passes.network
    read_shards(folder, network)
    # Experts may have other replicas than the rest. A rank on which nothing learns has no file.
    with ExitStack() as files:
        opened = {}
        for part in learner.optimizer.resume(done):
            path = rank_file(folder, _owner(network, part.placed))
            if path not in opened:
                opened[path] = files.enter_context(open_tensors(path))
            for name, tensor in _named_tensors(part):
                _fill(tensor, opened[path].get_tensor(name), path)


@torch.no_grad()
def take(saved: Unsharded, learner: MegatronLearner, done: Done) -> None:
    """Restore parameters and optimizer from what another layout, or the torch trainer, has saved.

    Raises:
        ModelLoadError: a file is missing, cut short, or of another model.
    """
    network = learner.passes.network
    network.load(saved.value, is_resumed=True)
    for part in learner.optimizer.resume(done):
        placed = part.placed
        if part.is_copy:
            _take(part.main, part, network.shard_of(placed, saved.value))
        for kind, moment in part.moments.items():
            _take(moment, part, network.shard_of(placed, partial(saved.moment, kind=kind)))


@torch.no_grad()
def shard_copies(folder: Path, network: Network, copy: Callable[[Tensor], Tensor]) -> list[FileCopy]:
    """Copies of this rank's shards of a network, without those that another replica writes."""
    shards = [shard for shard in _shards(network) if _is_first(shard[0])]
    return [
        FileCopy(path, [(placed.megatron, copy(tensor)) for placed, tensor in group])
        for path, group in groupby(shards, lambda shard: _own_file(folder, shard[0]))
    ]


@torch.no_grad()
def read_shards(folder: Path, network: Network) -> None:
    """Restore the parameters of a network.

    Raises:
        ModelLoadError: a file is missing, cut short, or of another model.
    """
    for path, group in groupby(network.pieces(), lambda piece: _own_file(folder, piece.placed)):
        with open_tensors(path) as opened:
            for placed, parameter in group:
                _fill(parameter, opened.get_tensor(placed.megatron), path)


def _own_file(folder: Path, placed: Placed) -> Path:
    """The file of this rank's shard of a parameter."""
    if placed.expert is None:
        return shard_file(folder, placed, parallel_state.get_tensor_model_parallel_rank())
    return shard_file(folder, placed, parallel_state.get_expert_tensor_and_model_parallel_rank())


def _replicas(placed: Placed) -> dist.ProcessGroup:
    """The ranks that have the same shard of a parameter."""
    group: dist.ProcessGroup = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if placed.expert is None
        else parallel_state.get_expert_data_parallel_group()
    )
    return group


def _is_first(placed: Placed) -> bool:
    """Whether this rank writes its shard: the first of those that have the same."""
    return _replicas(placed).rank() == 0


def _shards(network: Network) -> Iterator[tuple[Placed, Tensor]]:
    """The shards to write, without the last stage's copy of a tied embedding: the first stage writes it."""
    first = parallel_state.is_pipeline_first_stage()
    for placed, parameter in network.pieces():
        if first or not placed.rule.megatron.startswith("embedding."):
            yield placed, parameter.detach()


def _named_tensors(part: StatePart) -> Iterator[tuple[str, Tensor]]:
    if part.is_copy:
        yield f"{part.placed.megatron}.{MAIN}", part.main
    for name, moment in part.moments.items():
        yield f"{part.placed.megatron}.{name}", moment


def _owner(network: Network, placed: Placed) -> int:
    """The rank whose file holds this one's part of the optimizer: itself, or the first that has the same."""
    if network.layout.shares_the_optimizer:
        return dist.get_rank()
    return dist.get_process_group_ranks(_replicas(placed))[0]


def _take(tensor: Tensor, part: StatePart, shard: Tensor) -> None:
    tensor.copy_(shard.reshape(-1)[part.start : part.start + len(tensor)])


def _fill(tensor: Tensor, saved: Tensor, path: Path) -> None:
    if saved.shape != tensor.shape:
        raise ModelLoadError(
            f"{path} holds {list(saved.shape)} values where this rank has {list(tensor.shape)}; it is of "
            "another model."
        )
    tensor.copy_(saved)
