"""Weights of all ranks as a checkpoint's tensors, in buckets of rank 0 that every rank lays its own into."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.protocols import Bucket, TensorSpec
from agentrl.trainer.launch.shared_buffers import AHEAD, Filled
from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.local_ranks import LocalRanks
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.rules import Run
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import size_of, torch_dtype

_Mine = Mapping[Placed, Tensor]


class _Wanted(NamedTuple):
    """A parameter, and the tensors that it is sent as."""

    placed: Placed
    tensors: tuple[TensorSpec, ...]


_Load = tuple[_Wanted, ...]
"""The parameters of a bucket."""


@torch.no_grad()
def gathered(
    network: Network, manifest: Sequence[TensorSpec], local_ranks: LocalRanks
) -> Generator[Filled, None, int]:
    """Every tensor of the manifest, in its order; every rank calls it, rank 0 alone is given buckets.

    A bucket holds whole parameters, of `bucket_bytes` together at most; a larger one travels alone. Every
    rank on the machine of rank 0 lays its shards where they belong in the bucket; others send theirs, one at
    a time, and rank 0 lays them. Beside its own part, no rank holds more than a shard and rank 0's buckets.

    Returns:
        the checksum of all tensors; 0 on the other ranks.
    """
    mine = {piece.placed: piece.parameter.detach() for piece in network.pieces()}
    loads = _loads(network, manifest, local_ranks.pool.bucket_bytes)
    if dist.get_rank() == 0:
        return (yield from _filled(loads, network, mine, local_ranks))
    for load in loads:
        bytes_B = local_ranks.open(None)
        if bytes_B is None:
            _send(load, network, mine)
        else:
            _lay(load, network, mine, bytes_B)
        dist.barrier()
    return 0


def _filled(
    loads: Iterable[_Load], network: Network, mine: _Mine, local_ranks: LocalRanks
) -> Generator[Filled, None, int]:
    """On rank 0: the buckets, and their checksum."""
    sums: list[Future[list[int]]] = []
    # A checksum leaves this thread to fill the next buffer.
    with ThreadPoolExecutor(AHEAD) as pool:
        for load in loads:
            buffer, tensors = local_ranks.pool.take(_size(load)), _tensors(load)
            local_ranks.open(buffer)
            _lay(load, network, mine, buffer.bytes_B)
            _receive(load, network, local_ranks.far, buffer.bytes_B)
            dist.barrier()
            buffer.digests = pool.submit(digests_of, Bucket(tensors, buffer.bytes_B[: _size(load)].numpy()))
            sums.append(buffer.digests)
            yield Filled(tensors, buffer, local_ranks.pool)
        return sum_digests(digest for found in sums for digest in found.result())


def _loads(network: Network, manifest: Sequence[TensorSpec], max_bytes: int) -> Iterator[_Load]:
    """The parameters of each bucket."""
    specs = iter(manifest)
    load: _Load = ()
    for placed in network.shape.rules():
        wanted = _Wanted(placed, tuple(islice(specs, len(placed.hf))))
        if load and _size((*load, wanted)) > max_bytes:
            yield load
            load = ()
        load += (wanted,)
    yield load


def _size(load: _Load) -> int:
    return sum(size_of(spec) for wanted in load for spec in wanted.tensors)


def _tensors(load: _Load) -> tuple[TensorSpec, ...]:
    return tuple(spec for wanted in load for spec in wanted.tensors)


def _places(load: _Load, bytes_B: Tensor) -> Iterator[tuple[_Wanted, list[Tensor]]]:
    """Each parameter with the places of its tensors in a bucket."""
    offset = 0
    for wanted in load:
        places = []
        for spec in wanted.tensors:
            flat_B = bytes_B[offset : offset + size_of(spec)]
            places.append(flat_B.view(torch_dtype(spec.dtype)).view(spec.shape))
            offset += size_of(spec)
        yield wanted, places


def _lay(load: _Load, network: Network, mine: _Mine, bytes_B: Tensor) -> None:
    """Write what this rank has to give into a bucket."""
    for wanted, places in _places(load, bytes_B):
        givers = _givers(wanted.placed, network)
        if dist.get_rank() in givers:
            _write(mine[wanted.placed], givers.index(dist.get_rank()), wanted, places, network)


def _send(load: _Load, network: Network, mine: _Mine) -> None:
    """What this rank has to give, to rank 0."""
    for wanted in load:
        if dist.get_rank() in _givers(wanted.placed, network):
            dist.send(mine[wanted.placed].contiguous(), 0)


def _receive(load: _Load, network: Network, far: Collection[int], bytes_B: Tensor) -> None:
    """On rank 0: write what the ranks give that cannot do it themselves."""
    for wanted, places in _places(load, bytes_B):
        givers = _givers(wanted.placed, network)
        for number, rank in enumerate(givers):
            if rank in far:
                dtype = torch_dtype(wanted.tensors[0].dtype)
                shard = torch.empty(_shard_shape(wanted, network), dtype=dtype, device=here())
                dist.recv(shard, rank)
                _write(shard, number, wanted, places, network)


def _write(shard: Tensor, number: int, wanted: _Wanted, places: list[Tensor], network: Network) -> None:
    ranks = network.layout.tensor_model_parallel_size
    wanted.placed.rule.unshard(shard, Run(number, ranks), places, network.shape.dims(ranks))


def _givers(placed: Placed, network: Network) -> range:
    """The ranks that give a bucket what they have of a parameter, in the order of the tensor ranks."""
    # Megatron numbers its ranks by tensor rank first and by stage last.
    first = dist.get_world_size() // network.layout.pipeline_model_parallel_size * _stage_of(placed, network)
    return range(first, first + (network.layout.tensor_model_parallel_size if placed.rule.is_cut else 1))


def _shard_shape(wanted: _Wanted, network: Network) -> torch.Size:
    """As the rules say it, worked out on tensors without values."""
    ranks = network.layout.tensor_model_parallel_size
    empty = [torch.empty(spec.shape, device="meta") for spec in wanted.tensors]
    whole = wanted.placed.rule.join(empty, network.shape.dims(ranks))
    return wanted.placed.rule.cut(whole, ranks)[0].shape


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that has a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = ranks * network.layout.num_virtual_stages_per_pipeline_rank
    return placed.layer // (int(network.shape.sizes["num_layers"]) // stages) % ranks
