"""The places where a program would wait for a GPU: it reads a value, or a size that depends on values."""

from __future__ import annotations

import sys
from collections import Counter

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
_BY_VALUE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2")
_MASKS = (torch.bool, torch.uint8)


class Waits:
    """Counts them inside a block, by the line of the package or of Megatron that waits."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._modes = _Reads(self.places), _ByValue(self.places)

    def __enter__(self) -> Counter[str]:
        for mode in self._modes:
            mode.__enter__()
        return self.places

    def __exit__(self, *error: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Reads(TorchFunctionMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READS:
            self.places[f"{func.__name__} at {place()}"] += 1
        return func(*args, **(kwargs or {}))


class _ByValue(TorchDispatchMode):
    def __init__(self, places: Counter[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        # An index of a mask has as many elements as the mask has of True.
        by_mask = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in tree_leaves(args[1])
        )
        if name in _BY_VALUE or by_mask:
            self.places[f"{name} at {place()}"] += 1
        return func(*args, **(kwargs or {}))


def place() -> str:
    """The nearest line that is not torch's own."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch", "tests.trainer.waits", "contextlib", "functools")):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "a backward pass"
