"""Weights of all ranks as a checkpoint's tensors on rank 0, in buckets, one parameter after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl.protocols import Bucket, TensorSpec
from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.launch.rooms import AHEAD, Filled, Room
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.weights.checksum import added_up, digests_of
from agentrl.weights.codec import dtype_named, size_of

_Mine = Mapping[Placed, Tensor]


class _Wanted(NamedTuple):
    """A parameter, and the tensors that it is sent as."""

    placed: Placed
    tensors: tuple[TensorSpec, ...]


@torch.no_grad()
def gathered(
    network: Network, manifest: Sequence[TensorSpec], max_bytes: int
) -> Generator[Filled, None, int]:
    """Every tensor of the manifest, in its order; every rank calls it, rank 0 alone is given buckets.

    A bucket holds whole parameters, of at most `max_bytes` bytes together; a larger one travels alone. Those
    that have shards send them one parameter at a time, and rank 0 lays them where they belong: no rank ever
    holds more than one parameter, and rank 0 its buckets, beside its own part.

    Returns:
        the checksum of all tensors; 0 on the other ranks.
    """
    mine = {piece.placed: piece.parameter.detach() for piece in network.pieces()}
    if dist.get_rank() != 0:
        for placed in network.shape.rules():
            if _sends(placed, network):
                dist.send(mine[placed].contiguous(), 0)
        return 0
    sums: list[Future[list[int]]] = []
    free: list[Room] = []
    # A checksum takes longer than to fill a room, and leaves this thread to do that.
    with ThreadPoolExecutor(AHEAD) as beside:
        for load in _loads(network, manifest, max_bytes):
            room, tensors = _filled(load, network, mine, _room(max(_size(load), max_bytes), free))
            room.summed = beside.submit(digests_of, Bucket(tensors, room.bytes_B[: _size(load)].numpy()))
            sums.append(room.summed)
            yield Filled(tensors, room, free)
        return added_up(digest for found in sums for digest in found.result())


def _loads(network: Network, manifest: Sequence[TensorSpec], max_bytes: int) -> Iterator[tuple[_Wanted, ...]]:
    """The parameters of each bucket."""
    specs = iter(manifest)
    load: tuple[_Wanted, ...] = ()
    for placed in network.shape.rules():
        wanted = _Wanted(placed, tuple(islice(specs, len(placed.hf))))
        if load and _size((*load, wanted)) > max_bytes:
            yield load
            load = ()
        load += (wanted,)
    yield load


def _size(load: Sequence[_Wanted]) -> int:
    return sum(size_of(spec) for wanted in load for spec in wanted.tensors)


def _room(num_bytes: int, free: list[Room]) -> Room:
    """One that was used before, if it is large enough: fresh memory is slower to fill."""
    room = free.pop() if free else None
    if room is None or len(room.bytes_B) < num_bytes:
        return Room(num_bytes)
    if room.summed is not None:
        room.summed.result()
    return room


def _filled(
    load: Sequence[_Wanted], network: Network, mine: _Mine, room: Room
) -> tuple[Room, tuple[TensorSpec, ...]]:
    dims = network.shape.dims(network.layout.tensor_model_parallel_size)
    offset = 0
    for wanted in load:
        rule, shards = wanted.placed.rule, _shards(wanted, network, mine)
        whole = rule.glue(shards) if len(shards) > 1 else shards[0]
        for spec, part in zip(wanted.tensors, rule.part(whole, dims), strict=True):
            room.at(offset, spec).copy_(part)
            offset += size_of(spec)
    return room, tuple(spec for wanted in load for spec in wanted.tensors)


def _shards(wanted: _Wanted, network: Network, mine: _Mine) -> list[Tensor]:
    """On rank 0: all different shards of a parameter, in the order of the tensor ranks."""
    group = parallel_state.get_pipeline_model_parallel_group()
    first = dist.get_process_group_ranks(group)[_stage_of(wanted.placed, network)]
    ranks = network.layout.tensor_model_parallel_size
    shape = _shard_shape(wanted, network)
    shards: list[Tensor] = []
    coming: list[dist.Work] = []
    # Tensor ranks are numbered first: those of a stage follow one another.
    for source in range(first, first + (ranks if wanted.placed.rule.is_cut else 1)):
        if source == 0:
            shards.append(mine[wanted.placed])
            continue
        shards.append(torch.empty(shape, dtype=dtype_named(wanted.tensors[0].dtype), device=here()))
        work = dist.irecv(shards[-1], source)
        coming += [work] if work is not None else []
    for work in coming:
        work.wait()
    return shards


def _shard_shape(wanted: _Wanted, network: Network) -> torch.Size:
    """As the rules say it, worked out on tensors without values."""
    ranks = network.layout.tensor_model_parallel_size
    empty = [torch.empty(spec.shape, device="meta") for spec in wanted.tensors]
    whole = wanted.placed.rule.join(empty, network.shape.dims(ranks))
    return wanted.placed.rule.cut(whole, ranks)[0].shape


def _sends(placed: Placed, network: Network) -> bool:
    """Whether rank 0 waits for what this rank has of a parameter."""
    return (
        parallel_state.get_pipeline_model_parallel_rank() == _stage_of(placed, network)
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and (placed.rule.is_cut or parallel_state.get_tensor_model_parallel_rank() == 0)
    )


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that has a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = ranks * network.layout.num_virtual_stages_per_pipeline_rank
    return placed.layer // (int(network.shape.sizes["num_layers"]) // stages) % ranks
