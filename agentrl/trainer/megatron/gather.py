"""Weights of all ranks as a checkpoint's tensors: every rank writes its shards into the buckets of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import groupby, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.trainer.launch.shared_buffers import AHEAD, Filled
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.local_ranks import LocalRanks, from_first
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.rules import Run
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import grouped, size_of, torch_dtype
from agentrl.weights.device import Packed, allocated, layout_of, packed
from agentrl.weights.shared import HostCopy


class _Share(NamedTuple):
    """A parameter that has a part of some tensors. owners: the ranks that write their shards of it.

    parameter: this rank's shard; None = it has none.
    """

    placed: Placed
    owners: range
    parameter: nn.Parameter | None


class _Entry(NamedTuple):
    """Tensors that are sent, and the parameters that have parts of all of them: one, or those of experts."""

    tensors: tuple[TensorSpec, ...]
    shares: tuple[_Share, ...]


class _Load(NamedTuple):
    """The parameters of a bucket. sizes: of all their tensors (bytes)."""

    entries: Sequence[_Entry]
    tensors: tuple[TensorSpec, ...]
    sizes: Sequence[int]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


class BucketLoads:
    """What each bucket holds, in the order of a manifest: the same for every version.

    A bucket holds unsharded parameters, of `bucket_bytes` together at most; a larger one has a bucket of its
    own.
    """

    def __init__(self, network: Network, manifest: Sequence[TensorSpec], bucket_bytes: int) -> None:
        self.network, self.manifest, self.bucket_bytes = network, manifest, bucket_bytes
        parameters = {piece.placed: piece.parameter for piece in network.pieces()}
        specs = iter(manifest)
        entries = [
            _Entry(
                tuple(islice(specs, len(names))),
                tuple(_Share(each, _owners(each, network), parameters.get(each)) for each in every),
            )
            for names, every in groupby(network.shape.rules(), lambda placed: placed.hf)
        ]
        self.loads = [_load_of(group) for group in grouped(entries, _size, bucket_bytes)]
        self.layout = layout_of([load.tensors for load in self.loads])


@torch.no_grad()
def gathered(loads: BucketLoads, local_ranks: LocalRanks) -> Generator[Filled, None, int]:
    """Every tensor of the manifest, in its order; every rank calls it, and only rank 0 yields buckets.

    On the CPU every rank on the machine of rank 0 writes its shards into the bucket; other ranks, and all
    ranks on GPUs, send theirs, one at a time, and rank 0 writes them. Besides its own parameters, no rank
    holds more than a shard and rank 0's buckets.

    Returns:
        the checksum of all tensors; 0 on the other ranks.
    """
    if dist.get_rank() == 0:
        return (yield from _filled(loads, local_ranks))
    for load in loads.loads:
        bytes_B = local_ranks.open(None)
        if bytes_B is None:
            _send(load)
        else:
            _write_own(load, loads.network, bytes_B)
        dist.barrier()
    return 0


@torch.no_grad()
def packed_on_device(
    loads: BucketLoads, onloaded: Callable[[], AbstractContextManager[None]]
) -> Packed | None:
    """Every tensor of the manifest in memory of rank 0's device; every rank calls it, only rank 0 gets it.

    The other ranks send their shards from device to device. onloaded: has the parameters there for its block.

    Returns:
        None on the other ranks, and where the device has no such memory.
    """
    layout = loads.layout
    is_first = dist.get_rank() == 0
    memory = allocated(compute_device(), layout.num_bytes) if is_first and layout is not None else None
    if not all(from_first([memory is not None])):
        return None
    with onloaded():
        if memory is None or layout is None:
            for load in loads.loads:
                _send(load)
            return None
        others, remaining = range(1, dist.get_world_size()), iter(loads.loads)

        def fill(_: Sequence[TensorSpec], bytes_B: Tensor) -> None:
            load = next(remaining)
            _write_own(load, loads.network, bytes_B)
            _receive(load, loads.network, others, bytes_B)

        return packed(layout, memory, fill)


def _filled(loads: BucketLoads, local_ranks: LocalRanks) -> Generator[Filled, None, int]:
    """On rank 0: the buckets, and their checksum."""
    digests: list[Future[list[int]]] = []
    network, host_copy = loads.network, HostCopy()
    # Checksums run in threads, so that this one fills the next buffer.
    with ThreadPoolExecutor(AHEAD) as pool:
        for load in loads.loads:
            buffer, tensors = local_ranks.pool.take(load.num_bytes), load.tensors
            local_ranks.open(buffer)
            host_B = buffer.bytes_B[: load.num_bytes]
            # On a GPU the bucket is packed there: one copy for all of it, in place of one for each tensor.
            bytes_B = (
                host_B
                if compute_device().type == "cpu"
                else host_B.new_empty(len(host_B), device=compute_device())
            )
            _write_own(load, network, bytes_B)
            _receive(load, network, local_ranks.far, bytes_B)
            if bytes_B is not host_B:
                host_copy.copy(bytes_B, host_B)
            dist.barrier()
            buffer.digests = pool.submit(digests_of, Bucket(tensors, host_B.numpy()))
            digests.append(buffer.digests)
            yield Filled(tensors, buffer, local_ranks.pool)
        return sum_digests(digest for future in digests for digest in future.result())


def _load_of(entries: Sequence[_Entry]) -> _Load:
    tensors = tuple(spec for entry in entries for spec in entry.tensors)
    return _Load(entries, tensors, [size_of(spec) for spec in tensors])


def _size(entry: _Entry) -> int:
    return sum(map(size_of, entry.tensors))


def _views(load: _Load, bytes_B: Tensor) -> Iterator[tuple[_Share, list[Tensor]]]:
    """Each parameter with the views of its tensors in a bucket."""
    flat = iter(bytes_B[: load.num_bytes].split([*load.sizes]))
    for entry in load.entries:
        views = [next(flat).view(torch_dtype(spec.dtype)).view(spec.shape) for spec in entry.tensors]
        yield from ((share, views) for share in entry.shares)


def _write_own(load: _Load, network: Network, bytes_B: Tensor) -> None:
    """Write this rank's shards into a bucket."""
    rank = dist.get_rank()
    for share, views in _views(load, bytes_B):
        if rank in share.owners and share.parameter is not None:
            _write(share.parameter.detach(), share.owners.index(rank), share.placed, views, network)


def _send(load: _Load) -> None:
    """Send this rank's shards to rank 0."""
    for entry in load.entries:
        for share in entry.shares:
            if dist.get_rank() in share.owners and share.parameter is not None:
                dist.send(share.parameter.detach().contiguous(), 0)


def _receive(load: _Load, network: Network, far: Collection[int], bytes_B: Tensor) -> None:
    """On rank 0: write the shards of the ranks that cannot map the bucket."""
    if not far:
        return
    for share, views in _views(load, bytes_B):
        for number, rank in enumerate(share.owners):
            if rank in far:
                shape = _shard_shape(share.placed, views, network)
                shard = torch.empty(shape, dtype=views[0].dtype, device=compute_device())
                dist.recv(shard, rank)
                _write(shard, number, share.placed, views, network)


def _write(shard: Tensor, number: int, placed: Placed, views: list[Tensor], network: Network) -> None:
    ranks = network.layout.sharding_ranks(placed.expert)
    placed.rule.unshard(shard, Run(number, ranks), views, network.shape.dims(ranks))


def _owners(placed: Placed, network: Network) -> range:
    """The ranks that write their shards of a parameter, in the order of the tensor ranks."""
    # Megatron numbers its ranks by tensor rank first and by stage last; between them, by experts.
    layout, ranks = network.layout, network.layout.sharding_ranks(placed.expert)
    first = dist.get_world_size() // layout.pipeline_model_parallel_size * _stage_of(placed, network)
    if placed.expert is not None:
        first += placed.expert // (network.shape.num_experts // layout.expert_model_parallel_size) * ranks
    return range(first, first + (ranks if placed.rule.is_cut else 1))


def _shard_shape(placed: Placed, tensors: list[Tensor], network: Network) -> torch.Size:
    """The shape by a parameter's rule, computed on meta tensors."""
    ranks = network.layout.sharding_ranks(placed.expert)
    empty = [torch.empty(tensor.shape, device="meta") for tensor in tensors]
    unsharded = placed.rule.join(empty, network.shape.dims(ranks))
    return placed.rule.cut(unsharded, ranks)[0].shape


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that holds a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None or placed.depth is not None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = network.layout.stages(int(network.shape.sizes["num_layers"]))
    return next(stage for stage, layers in enumerate(stages) if placed.layer in layers) % ranks
