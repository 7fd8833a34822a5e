"""Weights of all ranks as a checkpoint's tensors: every rank writes its shards into the buckets of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import groupby, islice
from operator import add, sub
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.trainer.launch.shared_buffers import AHEAD, Filled
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.local_ranks import LocalRanks, from_first
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.rules import Run, ShardPlace
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


class _Copies:
    """Copies of one pair of dtypes into a bucket, which torch makes by one kernel, if they are runs.

    Each is a run of numbers on both sides, or none is. The sources are views of parameters: what these hold
    is what is copied.
    """

    def __init__(self, places: Sequence[ShardPlace], bytes_B: Tensor, *, are_runs: bool) -> None:
        self._dtype = places[0].tensor.dtype
        first = bytes_B.storage_offset() // self._dtype.itemsize
        places = sorted(places, key=lambda place: place.tensor.storage_offset())
        self._starts = [place.tensor.storage_offset() - first for place in places]
        self._targets = [(place.tensor.shape, place.tensor.stride()) for place in places]
        self._sources = [place.piece.view(-1) if are_runs else place.piece for place in places]
        self._runs: list[int] | None = None
        if are_runs:
            # Each of them, and what lies before it.
            ends = [0, *map(add, self._starts, map(len, self._sources))]
            gaps = map(sub, self._starts, ends)
            self._runs = [size for pair in zip(gaps, map(len, self._sources), strict=False) for size in pair]

    def repeat(self, bytes_B: Tensor) -> None:
        """Copy what the parameters hold now."""
        size = self._dtype.itemsize
        numbers = bytes_B[: len(bytes_B) // size * size].view(self._dtype)
        if self._runs is not None:
            targets = numbers[: sum(self._runs)].split(self._runs)[1::2]
        else:
            first = numbers.storage_offset()
            pairs = zip(self._targets, self._starts, strict=True)
            targets = [numbers.as_strided(*target, first + start) for target, start in pairs]
        torch._foreach_copy_(targets, self._sources)


class _Load:
    """The parameters of a bucket. sizes: of all their tensors (bytes)."""

    def __init__(self, entries: Sequence[_Entry], network: Network) -> None:
        self._entries, self._network = entries, network
        self.tensors = tuple(spec for entry in entries for spec in entry.tensors)
        self._sizes = [size_of(spec) for spec in self.tensors]
        self.num_bytes = sum(self._sizes)
        self._shapes: dict[Placed, torch.Size] = {}
        self._shards: list[tuple[nn.Parameter, Tensor]] = []
        self._copies: list[_Copies] | None = None

    def write_own(self, bytes_B: Tensor) -> None:
        """Write this rank's shards into a bucket, by copies that are found out once.

        They are found out again where a parameter has other memory than then; what was offloaded comes back
        to the same.
        """
        if self._copies is None or not all(parameter.is_set_to(shard) for parameter, shard in self._shards):
            self._copies = self._found(bytes_B)
        for copies in self._copies:
            copies.repeat(bytes_B)

    def send(self) -> None:
        """Send this rank's shards to rank 0."""
        for entry in self._entries:
            for share in entry.shares:
                if dist.get_rank() in share.owners and share.parameter is not None:
                    dist.send(share.parameter.detach().contiguous(), 0)

    def receive(self, far: Collection[int], bytes_B: Tensor) -> None:
        """On rank 0: write the shards of the ranks that cannot map the bucket."""
        if not far:
            return
        for share, views in self._views(bytes_B):
            for number, rank in ((n, rank) for n, rank in enumerate(share.owners) if rank in far):
                shape = self._shape_of(share.placed, views)
                shard = torch.empty(shape, dtype=views[0].dtype, device=compute_device())
                dist.recv(shard, rank)
                for tensor, piece in self._places(shard, number, share.placed, views):
                    tensor.copy_(piece)

    def _found(self, bytes_B: Tensor) -> list[_Copies]:
        """This rank's copies, in as few groups as can be."""
        rank, self._shards = dist.get_rank(), []
        groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ShardPlace]] = {}
        for share, views in self._views(bytes_B):
            if rank in share.owners and share.parameter is not None:
                shard = share.parameter.detach()
                self._shards.append((share.parameter, shard))
                for place in self._places(shard, share.owners.index(rank), share.placed, views):
                    is_run = place.tensor.is_contiguous() and place.piece.is_contiguous()
                    alike = place.tensor.dtype, place.piece.dtype, is_run
                    groups.setdefault(alike, []).append(place)
        return [_Copies(places, bytes_B, are_runs=alike[-1]) for alike, places in groups.items()]

    def _views(self, bytes_B: Tensor) -> Iterator[tuple[_Share, list[Tensor]]]:
        """Each parameter with the views of its tensors in a bucket."""
        flat = iter(bytes_B[: self.num_bytes].split(self._sizes))
        for entry in self._entries:
            views = [next(flat).view(torch_dtype(spec.dtype)).view(spec.shape) for spec in entry.tensors]
            yield from ((share, views) for share in entry.shares)

    def _places(
        self, shard: Tensor, number: int, placed: Placed, views: list[Tensor]
    ) -> Iterator[ShardPlace]:
        ranks = self._network.layout.sharding_ranks(placed.expert)
        return placed.rule.places(shard, Run(number, ranks), views, self._network.shape.dims(ranks))

    def _shape_of(self, placed: Placed, views: list[Tensor]) -> torch.Size:
        """That of a rank's shard, by the parameter's rule, computed on meta tensors."""
        if placed not in self._shapes:
            ranks = self._network.layout.sharding_ranks(placed.expert)
            empty = [torch.empty(view.shape, device="meta") for view in views]
            unsharded = placed.rule.join(empty, self._network.shape.dims(ranks))
            self._shapes[placed] = placed.rule.cut(unsharded, ranks)[0].shape
        return self._shapes[placed]


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
        self.loads = [_Load(group, network) for group in grouped(entries, _size, bucket_bytes)]
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
            load.send()
        else:
            load.write_own(bytes_B)
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
                load.send()
            return None
        others, remaining = range(1, dist.get_world_size()), iter(loads.loads)

        def fill(_: Sequence[TensorSpec], bytes_B: Tensor) -> None:
            load = next(remaining)
            load.write_own(bytes_B)
            load.receive(others, bytes_B)

        return packed(layout, memory, fill)


def _filled(loads: BucketLoads, local_ranks: LocalRanks) -> Generator[Filled, None, int]:
    """On rank 0: the buckets, and their checksum."""
    digests: list[Future[list[int]]] = []
    host_copy = HostCopy()
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
            load.write_own(bytes_B)
            load.receive(local_ranks.far, bytes_B)
            if bytes_B is not host_B:
                host_copy.copy(bytes_B, host_B)
            dist.barrier()
            buffer.digests = pool.submit(digests_of, Bucket(tensors, host_B.numpy()))
            digests.append(buffer.digests)
            yield Filled(tensors, buffer, local_ranks.pool)
        return sum_digests(digest for future in digests for digest in future.result())


def _size(entry: _Entry) -> int:
    return sum(map(size_of, entry.tensors))


def _owners(placed: Placed, network: Network) -> range:
    """The ranks that write their shards of a parameter, in the order of the tensor ranks."""
    # Megatron numbers its ranks by tensor rank first and by stage last; between them, by experts.
    layout, ranks = network.layout, network.layout.sharding_ranks(placed.expert)
    first = dist.get_world_size() // layout.pipeline_model_parallel_size * _stage_of(placed, network)
    if placed.expert is not None:
        first += placed.expert // (network.shape.num_experts // layout.expert_model_parallel_size) * ranks
    return range(first, first + (ranks if placed.rule.is_cut else 1))


def _stage_of(placed: Placed, network: Network) -> int:
    """The pipeline rank that holds a parameter; the first of two."""
    ranks = network.layout.pipeline_model_parallel_size
    if placed.layer is None or placed.depth is not None:
        return 0 if placed.rule.megatron.startswith("embedding.") else ranks - 1
    stages = network.layout.stages(int(network.shape.sizes["num_layers"]))
    return next(stage for stage, layers in enumerate(stages) if placed.layer in layers) % ranks
