"""Tensors to byte buckets and back. Bytes only: no dtype is ever converted, so bf16 is safe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    revert_weight_conversion,
)

from agentrl.types.seams import Bucket, TensorSpec

T = TypeVar("T")
NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
Change: TypeAlias = Callable[[str, Tensor], Tensor]


def named_weights(
    module: nn.Module, own: Mapping[str, Tensor] | None = None, change: Change | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint of `module`; tensors that share memory come once, under the first name.

    Tied weights (an lm_head that is the embedding) share memory and are sent under the name of their first
    use, which is the one that a Hugging Face checkpoint keeps.

    transformers keeps the experts of a layer as one tensor, and saves, for most families, one for each: these
    are copies, made as the iterator reaches their layer.

    A tensor that ranks share is gathered as the iterator reaches it: every rank has to take all.

    own: the tensors in place of the module's own state, by the module's names. change: of a tensor, by its
    name there, as it is sent.
    """
    own = module.state_dict() if own is None else own
    model = module if isinstance(module, PreTrainedModel) else None
    renamed = {} if model is None else names_in_checkpoints(model, own)
    sent: set[tuple[object, ...]] = set()
    for name, tensor in own.items():
        # Also an empty part has memory of its own.
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        memory = (
            part.untyped_storage().data_ptr(),
            part.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
        )
        if tensor.numel() and memory in sent:
            continue
        sent.add(memory)
        sends = tensor if change is None else change(name, tensor)
        sends = sends.full_tensor() if isinstance(sends, DTensor) else sends
        if model is not None and name in renamed:
            yield from in_parts(model, name, sends).items()
        else:
            yield name, sends


def names_in_checkpoints(
    model: PreTrainedModel, own: Mapping[str, Tensor]
) -> dict[str, dict[str, torch.Size]]:
    """The tensors that a checkpoint has under other names, or in parts: their names and shapes there."""
    sizes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in own.items()}
    renamed = set(own) - set(revert_weight_conversion(model, sizes))
    return {
        name: {part: t.shape for part, t in revert_weight_conversion(model, {name: sizes[name]}).items()}
        for name in own
        if name in renamed
    }


def in_parts(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of a model as a checkpoint has it. name: that of the model."""
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return parts


def of_parts(model: PreTrainedModel, name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `in_parts`."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    transform: WeightRenaming | WeightConverter | None = None
    for part, tensor in parts.items():
        renamed = apply_renamings(part, renamings)
        renamed, pattern = apply_converters(renamed, converters)
        if pattern is None:
            return tensor
        transform = transform or deepcopy(by_pattern[pattern])
        transform.add_tensor(renamed, part, pattern, tensor)
    assert transform is not None
    whole: Tensor | list[Tensor] = transform.convert(name, model=model, config=model.config)[name]
    return whole[0] if isinstance(whole, list) else whole


def manifest_of(named_tensors: NamedTensors) -> tuple[TensorSpec, ...]:
    """Name, shape and dtype of every tensor, in input order."""
    return tuple(_spec(name, tensor) for name, tensor in named_tensors)


def pack_buckets(named_tensors: NamedTensors, max_bytes: int) -> Iterator[Bucket]:
    """Pack complete tensors end to end into buckets of at most `max_bytes` bytes, in input order.

    A tensor larger than `max_bytes` gets a bucket of its own. Only one bucket is in memory at a time.

    Raises:
        ValueError: `max_bytes` is not positive.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    for pending in grouped(named_tensors, lambda pair: pair[1].nbytes, max_bytes):
        yield _bucket(pending)


def grouped(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, in groups of `most` bytes at most; a larger item has a group of its own."""
    group: list[T] = []
    num_bytes = 0
    for item in items:
        if group and num_bytes + size(item) > most:
            yield group
            group, num_bytes = [], 0
        group.append(item)
        num_bytes += size(item)
    if group:
        yield group


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
    # torch does not wrap read-only memory.
    buffer_B = torch.from_numpy(bucket.data) if bucket.data.flags.writeable else None
    offset = 0
    for spec, data in slices(bucket):
        dtype = torch_dtype(spec.dtype)
        if (
            buffer_B is None
            or not len(data)
            or buffer_B.data_ptr() % dtype.itemsize
            or offset % dtype.itemsize
        ):
            yield spec.name, _copy(spec, data)
        else:
            yield spec.name, buffer_B[offset : offset + len(data)].view(dtype).view(spec.shape)
        offset += len(data)


def non_finite(named_tensors: NamedTensors) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity; None = all numbers are finite.

    It takes one pass over each tensor, without a copy.
    """
    for name, tensor in named_tensors:
        if tensor.is_floating_point() and tensor.numel():
            # torch has no minimum of the types of one byte. A NaN is the minimum of all that hold one.
            lowest, highest = (tensor.half() if tensor.itemsize == 1 else tensor).aminmax()
            if not (lowest.isfinite() and highest.isfinite()):
                return name
    return None


def size_of(spec: TensorSpec) -> int:
    """The size of a tensor in bytes.

    Raises:
        ValueError: its dtype is unknown.
    """
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in row-major order; shares memory with contiguous CPU tensors."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return view


def torch_dtype(name: str) -> torch.dtype:
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
    tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
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
