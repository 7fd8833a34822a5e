"""The places where a program would wait for a GPU, found on a CPU.

It waits where it reads a value, or a size that depends on values; and where it copies to the GPU, other than
from pinned memory by `to_device`. All memory here is the CPU's: a tensor counts as one of the host if it was
made without a device, or from numpy outside of `to_device`, or of such tensors alone. All others count as
tensors of the GPU. In a backward pass reads are seen, but no copies.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
}
_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray}
_ITEMS = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_BY_VALUE = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"),
    *("aten::unique_consecutive", "aten::unique_dim", "aten::bincount", "aten::allclose"),
)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
_MASKS = (torch.bool, torch.uint8)


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts them inside a block, by the line of the package or of Megatron that waits."""
    places: Counter[str] = Counter()
    from_numpy, cuda = torch.from_numpy, torch.Tensor.cuda

    def noted_from_numpy(array):
        tensor = from_numpy(array)
        is_pinned = sys._getframe(1).f_globals["__name__"] == "agentrl.losses.gpu"
        return tensor if is_pinned else _on_host(tensor)

    # Where Megatron is told that the CPU is a GPU, this is no function of torch's.
    def noted_cuda(tensor, *args, **options):
        if _is_on_host(tensor):
            places[f"cuda at {place()}"] += 1
        return cuda(tensor, *args, **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "from_numpy", noted_from_numpy))
        stack.enter_context(patch.object(torch.Tensor, "cuda", noted_cuda))
        stack.enter_context(_Calls(places))
        stack.enter_context(_ByValue(places))
        yield places


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor._is_on_host = True
    return tensor


def _is_on_host(value: object) -> bool:
    return getattr(value, "_is_on_host", False)


class _Calls(TorchFunctionMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        is_host = all(map(_is_on_host, tensors))
        if _waits(func, args, options, is_host=is_host):
            self.places[f"{func.__name__} at {place()}"] += 1
        result = func(*args, **options)
        if func is torch.Tensor.to and _is_on_host(args[0]) and _device_in(args, options) is not None:
            return result.clone()
        for leaf in tree_leaves(result) if is_host and options.get("device") is None else ():
            if isinstance(leaf, torch.Tensor):
                _on_host(leaf)
        return result


def _waits(func, args, options, *, is_host: bool) -> bool:
    if func in _READS:
        return not is_host
    if func in _OF_DATA:
        return options.get("device") is not None
    if func is torch.Tensor.new_tensor:
        return not is_host
    if func is torch.Tensor.copy_:
        return _is_on_host(args[0]) != _is_on_host(args[1])
    if func in _ITEMS:
        return not _is_on_host(args[0]) and any(
            isinstance(part, list) or (_is_on_host(part) and part.ndim)
            for given in args[1:]
            for part in (given if isinstance(given, tuple) else (given,))
        )
    device = _device_in(args, options) if func is torch.Tensor.to else None
    is_to_host = isinstance(device, str) and device.startswith("cpu")
    return device is not None and _is_on_host(args[0]) != is_to_host


def _device_in(args, options) -> object:
    """The device that `Tensor.to` is given, or the tensor that has it."""
    given = [*args[1:], options.get("device"), options.get("other")]
    return next((value for value in given if isinstance(value, str | torch.device | torch.Tensor)), None)


class _ByValue(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not _is_on_host(args[0] if args else None) and _is_by_value(func, args, kwargs or {}):
            self.places[f"{func._schema.name} at {place()}"] += 1
        return func(*args, **(kwargs or {}))


def _is_by_value(func, args, options) -> bool:
    name = func._schema.name
    if name == "aten::repeat_interleave":
        return func._overloadname == "Tensor" and options.get("output_size") is None
    return name in _BY_VALUE or (name in _INDEXING and _counts_a_mask(*args))


def _counts_a_mask(_self: torch.Tensor, indices, value: torch.Tensor | None = None, *_: object) -> bool:
    """An index of a mask has as many elements as the mask has of True; torch fills one number in without."""
    is_filled = value is not None and value.numel() == 1
    return not is_filled and any(
        isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in tree_leaves(indices)
    )


def place() -> str:
    """The nearest line that is not torch's own."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "tests.trainer.waits", "contextlib", "functools")):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "a backward pass"
