"""Weights that are cast on their way out: in rank 0, before any checksum, as the engine's model is stored.

The trainer's own stay as they are. What leaves it has the names, numbers and scales of the quantized
directory that it began with. An engine that computes with the numbers dequantized gets these, under the
weights' own names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.launch.shared_buffers import AHEAD, Filled, bucket_of
from agentrl.types.seams import TensorSpec
from agentrl.weights.cast import Matrix, encoded, rounded
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import manifest_of, size_of, views
from agentrl.weights.device import Packed, allocated, layout_of, packed, views_in
from agentrl.weights.hf.tensors import TensorFiles
from agentrl.weights.shared import BufferPool


class Cast(NamedTuple):
    """directory: the quantized model. is_rounded: dequantized again, under the weights' own names."""

    directory: str
    is_rounded: bool = False


@torch.no_grad()
def cast_buckets(
    stream: Generator[Filled, None, int], cast: Cast, device: torch.device
) -> Generator[Filled, None, int]:
    """A stream of buckets with its matrices cast; returns their checksum, 0 where it yields nothing.

    device: what computes.
    """
    pool = BufferPool(1)
    digests: list[Future[list[int]]] = []
    # Checksums run in threads, so that this one casts the next bucket.
    with ThreadPoolExecutor(AHEAD) as threads:
        for source in stream:
            filled = _filled(source, cast, pool, device)
            source.pool.give_back(source.buffer)
            filled.buffer.digests = threads.submit(digests_of, bucket_of(filled))
            digests.append(filled.buffer.digests)
            yield filled
        return sum_digests(digest for future in digests for digest in future.result())


@torch.no_grad()
def cast_on_device(source: Packed, cast: Cast, device: torch.device) -> Packed | None:
    """Weights in the memory of a device with their matrices cast, in memory of its own; `source` is freed.

    Returns None where the device has no room for both.
    """
    matrices, parts = _matrices_of(cast.directory), source.weights.parts
    layout = layout_of([tuple(_specs(part.tensors, matrices)) for part in parts])
    memory = None if layout is None else allocated(device, layout.num_bytes)
    if layout is None or memory is None:
        source.memory.free()
        return None
    remaining = iter(parts)

    def fill(load: Sequence[TensorSpec], bytes_B: Tensor) -> None:
        part = next(remaining)
        named = views_in(part.tensors, source.memory.bytes_B[part.start :])
        for (_, target), (_, tensor) in zip(views_in(load, bytes_B), _cast(named, cast), strict=True):
            target.copy_(tensor)

    done = packed(layout, memory, fill)
    source.memory.free()
    return done._replace(not_finite=source.not_finite or done.not_finite)


def _filled(source: Filled, cast: Cast, pool: BufferPool, device: torch.device) -> Filled:
    """A bucket with its matrices cast, in a buffer of the pool."""
    named = ((name, tensor.to(device)) for name, tensor in views(bucket_of(source)))
    tensors = [(name, tensor.cpu()) for name, tensor in _cast(named, cast)]
    load = manifest_of(tensors)
    filled, end = Filled(load, pool.take(sum(map(size_of, load))), pool), 0
    for _, tensor in tensors:
        source_B = tensor.contiguous().reshape(-1).view(torch.uint8)
        filled.buffer.bytes_B[end : end + len(source_B)].copy_(source_B)
        end += len(source_B)
    return filled


def _cast(named: Iterable[tuple[str, Tensor]], cast: Cast) -> Iterator[tuple[str, Tensor]]:
    matrices = _matrices_of(cast.directory)
    for name, tensor in named:
        matrix = matrices.get(name)
        if matrix is None:
            yield name, tensor
        elif cast.is_rounded:
            yield name, rounded(tensor, matrix)
        else:
            numbers = encoded(tensor, matrix)
            yield from ((part.name, each) for part, each in zip(matrix.parts, numbers, strict=True))


def _specs(load: Iterable[TensorSpec], matrices: Mapping[str, Matrix]) -> Iterator[TensorSpec]:
    for spec in load:
        yield from matrices[spec.name].parts if spec.name in matrices else (spec,)


@lru_cache(1)
def _matrices_of(directory: str) -> Mapping[str, Matrix]:
    with TensorFiles(directory) as files:
        return files.matrices
