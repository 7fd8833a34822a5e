"""Weights of all ranks as a checkpoint's tensors: every rank writes its shards into the buckets of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.protocols import Bucket, TensorSpec
from agentrl.trainer.launch.shared_buffers import AHEAD, Filled
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.local_ranks import LocalRanks, from_first
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.rules import Run
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import grouped, size_of, torch_dtype
from agentrl.weights.device import Packed, allocated, layout_of, packed
from agentrl.weights.host_copy import HostCopy

_Shards = Mapping[Placed, Tensor]


class _Entry(NamedTuple):
    """A parameter, and the tensors that it is sent as."""

    placed: Placed
    tensors: tuple[TensorSpec, ...]


_Load = tuple[_Entry, ...]
"""The parameters of a bucket."""


@torch.no_grad()
def gathered(
    network: Network, manifest: Sequence[TensorSpec], local_ranks: LocalRanks
) -> Generator[Filled, None, int]:
    """Every tensor of the manifest, in its order; every rank calls it, and only rank 0 yields buckets.

    A bucket holds unsharded parameters, of `bucket_bytes` together at most; a larger one has a bucket of its
    own. On the CPU every rank on the machine of rank 0 writes its shards into the bucket; other ranks, and
    all ranks on GPUs, send theirs, one at a time, and rank 0 writes them. Besides its own parameters, no rank
    holds more than a shard and rank 0's buckets.

    Returns:
        the checksum of all tensors; 0 on the other ranks.
    """
    shards = {piece.placed: piece.parameter.detach() for piece in network.pieces()}
    loads = _loads(network, manifest, local_ranks.pool.bucket_bytes)
    if dist.get_rank() == 0:
        return (yield from _filled(loads, network, shards, local_ranks))
    for load in loads:
        bytes_B = local_ranks.open(None)
        if bytes_B is None:
            _send(load, network, shards)
        else:
            _write_own(load, network, shards, bytes_B)
        dist.barrier()
    return 0


@torch.no_grad()
def packed_on_device(
    network: Network,
    manifest: Sequence[TensorSpec],
    bucket_bytes: int,
    onloaded: Callable[[], AbstractContextManager[None]],
) -> Packed | None:
    """Every tensor of the manifest in memory of rank 0's device; every rank calls it, only rank 0 gets it.

    The other ranks send their shards from device to device. onloaded: has the parameters there for its block.

    Returns:
        None on the other ranks, and where the device has no such memory.
    """
    loads = tuple(_loads(network, manifest, bucket_bytes))
    layout = layout_of([_tensors(load) for load in loads])
    is_first = dist.get_rank() == 0
    memory = allocated(compute_device(), layout.num_bytes) if is_first and layout is not None else None
    if not all(from_first([memory is not None])):
        return None
    with onloaded():
        shards = {piece.placed: piece.parameter.detach() for piece in network.pieces()}
        if memory is None or layout is None:
            for load in loads:
                _send(load, network, shards)
            return None
        remaining = iter(loads)

        def fill(_: Sequence[TensorSpec], bytes_B: Tensor) -> None:
            load = next(remaining)
            _write_own(load, network, shards, bytes_B)
            _receive(load, network, range(1, dist.get_world_size()), bytes_B)

        return packed(layout, memory, fill)


def _filled(
    loads: Iterable[_Load], network: Network, shards: _Shards, local_ranks: LocalRanks
) -> Generator[Filled, None, int]:
    """On rank 0: the buckets, and their checksum."""
    digests: list[Future[list[int]]] = []
    host_copy = HostCopy()
    # Checksums run in threads, so that this one fills the next buffer.
    with ThreadPoolExecutor(AHEAD) as pool:
        for load in loads:
            buffer, tensors = local_ranks.pool.take(_size(load)), _tensors(load)
            local_ranks.open(buffer)
            host_B = buffer.bytes_B[: _size(load)]
            # On a GPU the bucket is packed there: one copy for all of it, in place of one for each tensor.
            bytes_B = (
                host_B
                if compute_device().type == "cpu"
                else host_B.new_empty(len(host_B), device=compute_device())
            )
            _write_own(load, network, shards, bytes_B)
            _receive(load, network, local_ranks.far, bytes_B)
            if bytes_B is not host_B:
                host_copy.copy(bytes_B, host_B)
            dist.barrier()
            buffer.digests = pool.submit(digests_of, Bucket(tensors, host_B.numpy()))
            digests.append(buffer.digests)
            yield Filled(tensors, buffer, local_ranks.pool)
        return sum_digests(digest for future in digests for digest in future.result())


def _loads(network: Network, manifest: Sequence[TensorSpec], max_bytes: int) -> Iterator[_Load]:
    """The parameters of each bucket."""
    specs = iter(manifest)
    entries = (_Entry(placed, tuple(islice(specs, len(placed.hf)))) for placed in network.shape.rules())
    return map(tuple, grouped(entries, lambda entry: _size((entry,)), max_bytes))


def _size(load: _Load) -> int:
    return sum(size_of(spec) for entry in load for spec in entry.tensors)


def _tensors(load: _Load) -> tuple[TensorSpec, ...]:
    return tuple(spec for entry in load for spec in entry.tensors)


def _views(load: _Load, bytes_B: Tensor) -> Iterator[tuple[_Entry, list[Tensor]]]:
    """Each parameter with the views of its tensors in a bucket."""
    offset = 0
    for entry in load:
        views = []
        for spec in entry.tensors:
            flat_B = bytes_B[offset : offset + size_of(spec)]
            views.append(flat_B.view(torch_dtype(spec.dtype)).view(spec.shape))
            offset += size_of(spec)
        yield entry, views


def _write_own(load: _Load, network: Network, shards: _Shards, bytes_B: Tensor) -> None:
    """Write this rank's shards into a bucket."""
    for entry, views in _views(load, bytes_B):
        owners = _owners(entry.placed, network)
        if dist.get_rank() in owners:
            _write(shards[entry.placed], owners.index(dist.get_rank()), entry, views, network)


def _send(load: _Load, network: Network, shards: _Shards) -> None:
    """Send this rank's shards to rank 0."""
    for entry in load:
        if dist.get_rank() in _owners(entry.placed, network):
            dist.send(shards[entry.placed].contiguous(), 0)


def _receive(load: _Load, network: Network, far: Collection[int], bytes_B: Tensor) -> None:
    """On rank 0: write the shards of the ranks that cannot map the bucket."""
    for entry, views in _views(load, bytes_B):
        owners = _owners(entry.placed, network)
        for number, rank in enumerate(owners):
            if rank in far:
                dtype = torch_dtype(entry.tensors[0].dtype)
                shard = torch.empty(_shard_shape(entry, network), dtype=dtype, device=compute_device())
                dist.recv(shard, rank)
                _write(shard, number, entry, views, network)


def _write(shard: Tensor, number: int, entry: _Entry, views: list[Tensor], network: Network) -> None:
    ranks = network.layout.tensor_model_parallel_size
    entry.placed.rule.unshard(shard, Run(number, ranks), views, network.shape.dims(ranks))


def _owners(placed: Placed, network: Network) -> range:
    """The ranks that write their shards of a parameter, in the order of the tensor ranks."""
    # Megatron numbers its ranks by tensor rank first and by stage last.
    first = dist.get_world_size() // network.layout.pipeline_model_parallel_size * _stage_of(placed, network)
    return range(first, first + (network.layout.tensor_model_parallel_size if placed.rule.is_cut else 1))


def _shard_shape(entry: _Entry, network: Network) -> torch.Size:
    """The shape by the entry's rule, computed on meta tensors."""
    ranks = network.layout.tensor_model_parallel_size
    empty = [torch.empty(spec.shape, device="meta") for spec in entry.tensors]
    unsharded = entry.placed.rule.join(empty, network.shape.dims(ranks))
    return entry.placed.rule.cut(unsharded, ranks)[0].shape


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that holds a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = ranks * network.layout.num_virtual_stages_per_pipeline_rank
    return placed.layer // (int(network.shape.sizes["num_layers"]) // stages) % ranks
