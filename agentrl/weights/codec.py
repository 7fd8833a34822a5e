"""Tensors to byte buckets and back. Bytes only: no dtype is ever converted, so bf16 is safe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from agentrl.protocols import Bucket, TensorSpec

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint of `module` holds, each piece of memory once, under its first name.

    Tied weights (an lm_head that is the embedding) share memory and travel under the name they
    have where they are first used, which is the one a Hugging Face checkpoint keeps.
    """
    sent: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in module.state_dict().items():
        memory = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if tensor.numel() and memory in sent:
            continue
        sent.add(memory)
        yield name, tensor


def manifest_of(named_tensors: NamedTensors) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every tensor, in the order given."""
    return tuple(_spec(name, tensor) for name, tensor in named_tensors)


def pack_buckets(named_tensors: NamedTensors, max_bytes: int) -> Iterator[Bucket]:
    """Lay whole tensors end to end into buckets of at most `max_bytes` bytes, in the order given.

    A tensor larger than `max_bytes` travels alone. Only one bucket is in memory at a time.

    Raises:
        ValueError: `max_bytes` is not positive.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    waiting: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named_tensors:
        if waiting and filled + tensor.nbytes > max_bytes:
            yield _bucket(waiting)
            waiting, filled = [], 0
        waiting.append((name, tensor))
        filled += tensor.nbytes
    if waiting:
        yield _bucket(waiting)


def slices(bucket: Bucket) -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
    """Yield a bucket's tensors as bytes; they share the bucket's memory.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    sizes = [size_of(spec) for spec in bucket.tensors]
    if sum(sizes) != bucket.data.size:
        raise ValueError(f"the bucket holds {bucket.data.size} bytes, its tensors need {sum(sizes)}")
    offset = 0
    for spec, size in zip(bucket.tensors, sizes, strict=True):
        yield spec, bucket.data[offset : offset + size]
        offset += size


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield a bucket's tensors, each in memory of its own on the CPU.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    for spec, data in slices(bucket):
        yield spec.name, _copy(spec, data)


def views(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yield a bucket's tensors; they share its memory where it is aligned to their dtype: do not write to it.

    Raises:
        ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
    """
    # torch takes no memory that it must not write to.
    whole_B = torch.from_numpy(bucket.data) if bucket.data.flags.writeable else None
    offset = 0
    for spec, data in slices(bucket):
        dtype = dtype_named(spec.dtype)
        if whole_B is None or not len(data) or whole_B.data_ptr() % dtype.itemsize or offset % dtype.itemsize:
            yield spec.name, _copy(spec, data)
        else:
            yield spec.name, whole_B[offset : offset + len(data)].view(dtype).view(spec.shape)
        offset += len(data)


def size_of(spec: TensorSpec) -> int:
    """How many bytes a tensor has.

    Raises:
        ValueError: its dtype is unknown.
    """
    return int(np.prod(spec.shape, dtype=np.int64)) * dtype_named(spec.dtype).itemsize


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in row-major order; shares memory with contiguous CPU tensors."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return view


def dtype_named(name: str) -> torch.dtype:
    """The dtype that torch prints as `torch.NAME`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype named {name!r}")
    return dtype


def _copy(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> Tensor:
    # Tensors that follow an odd-sized one are not aligned to their dtype.
    tensor = torch.empty(spec.shape, dtype=dtype_named(spec.dtype))
    bytes_of(tensor)[:] = data
    return tensor


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _bucket(named_tensors: list[tuple[str, Tensor]]) -> Bucket:
    data = np.empty(sum(tensor.nbytes for _, tensor in named_tensors), dtype=np.uint8)
    offset = 0
    for _, tensor in named_tensors:
        data[offset : offset + tensor.nbytes] = bytes_of(tensor)
        offset += tensor.nbytes
    return Bucket(manifest_of(named_tensors), data)
