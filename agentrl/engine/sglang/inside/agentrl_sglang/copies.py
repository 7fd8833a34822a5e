"""The copies by which a model loads its weights: recorded once, and repeated from then on.

SGLang loads a checkpoint tensor by tensor, each by some lines of Python, which takes a server with a card
longer than the copies do. What `load_weights` does with the first version is recorded: if it copied parts of
the sender's memory to places of the model, and did nothing else, the same copies are made of every later
version with the same layout, all of a part at once. Where it did anything else (a number that is derived from
a weight, a conversion), every version is loaded as the first one was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .device import bits, differs
from .locations import Model

_COPY = torch.ops.aten.copy_.default
_CONSTANT = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
"""They write what no weight decides, so that it need not be repeated."""

_GROUP_BYTES = 64 << 20
"""Two copies of a group are made to compare it, unless it is one tensor."""

Layout = Sequence[object]
"""What a later version has to have, too, for the copies to be the same."""


class _Copy(NamedTuple):
    """target: in the model. dtype, start, stride: of the source, from the start of its part (numbers)."""

    target: torch.Tensor
    dtype: torch.dtype
    start: int
    stride: tuple[int, ...]


class _Group:
    """Copies out of a part that torch makes by one kernel, where it can; all sources have one dtype."""

    def __init__(self, copies: Sequence[_Copy]) -> None:
        self._copies = copies
        self._targets = [copy.target for copy in copies]
        self._dtype = copies[0].dtype
        # What is not contiguous is copied to compare it.
        self._flat = [bits(t).view(-1) if t.is_contiguous() else None for t in self._targets]
        self._run = _run_of(copies)

    def repeat(self, part_B: torch.Tensor) -> torch.Tensor:
        """Copy the bytes of a later version. Returns whether the model has other bits now, on the device."""
        size = self._dtype.itemsize
        numbers = part_B[: len(part_B) // size * size].view(self._dtype)
        if self._run is not None:
            start, sizes, targets = self._run
            run = numbers[start : start + sum(sizes)]
            torch._foreach_copy_(targets, run.split(sizes))
            return (torch.cat([bits(target) for target in targets]) != bits(run)).any()
        first = numbers.storage_offset()
        sources = [
            numbers.as_strided(copy.target.shape, copy.stride, first + copy.start) for copy in self._copies
        ]
        torch._foreach_copy_(self._targets, sources)
        if len(sources) == 1:
            return differs(self._targets[0], sources[0])
        pairs = zip(self._flat, self._targets, strict=True)
        held = [bits(target).reshape(-1) if flat is None else flat for flat, target in pairs]
        sent = [bits(source.to(self._targets[0].dtype)).reshape(-1) for source in sources]
        return (torch.cat(held) != torch.cat(sent)).any()


def _run_of(copies: Sequence[_Copy]) -> tuple[int, list[int], list[torch.Tensor]] | None:
    """Several sources that lie end to end: where they begin, their sizes (numbers), and the targets, flat.

    None = they do not, one side is converted or lies otherwise, or there is one.
    """
    copies = sorted(copies, key=lambda copy: copy.start)
    sizes = [copy.target.numel() for copy in copies]
    ends = [copy.start + size for copy, size in zip(copies, sizes, strict=True)]
    is_run = all(
        copy.target.is_contiguous()
        and copy.target.stride() == copy.stride
        and copy.target.dtype == copy.dtype
        for copy in copies
    )
    if (
        len(copies) < 2
        or not is_run
        or any(a != copy.start for a, copy in zip(ends, copies[1:], strict=False))
    ):
        return None
    return copies[0].start, sizes, [copy.target.view(-1) for copy in copies]


class _Copies(NamedTuple):
    """modules: of the model. by_part: the copies of each part. unread: see `load_device`."""

    layout: Layout
    modules: Sequence[ref[torch.nn.Module]]
    memory: Sequence[int]
    by_part: Mapping[int, Sequence[_Group]]
    unread: dict[str, tuple[str, int] | None]


_known: WeakKeyDictionary[Model, _Copies] = WeakKeyDictionary()


def recorded(model: Model, layout: Layout) -> _Copies | None:
    """The copies that load this layout; None = it was not loaded yet, or the model has moved since."""
    copies = _known.get(model)
    if copies is None or copies.layout != layout or copies.memory != _memory_of(copies.modules):
        return None
    return copies


def remember(
    model: Model, layout: Layout, recording: CopyRecorder, unread: dict[str, tuple[str, int] | None]
) -> None:
    """Keep the copies of a call of `load_weights` that was right, if repeating them would be."""
    _known.pop(model, None)
    if recording.is_repeatable:
        # Strong ones would keep the model, and so the entry.
        modules = [ref(module) for _, module in model.named_modules()]
        _known[model] = _Copies(layout, modules, _memory_of(modules), recording.by_part(), unread)


def _memory_of(modules: Sequence[ref[torch.nn.Module]]) -> list[int]:
    there = [module for module in (each() for each in modules) if module is not None]
    owned = ((*module._parameters.values(), *module._buffers.values()) for module in there)
    return [tensor.data_ptr() for tensors in owned for tensor in tensors if tensor is not None]


class CopyRecorder(TorchDispatchMode):
    """Records what its block does with parts of a sender's memory, which `begin` announces one by one."""

    def __init__(self) -> None:
        # It has no types.
        initialize: Callable[[TorchDispatchMode], None] = TorchDispatchMode.__init__
        initialize(self)
        self._is_pure, self._is_paused = True, False
        self._copies: list[tuple[int, _Copy]] = []
        self._constants: list[torch.Tensor] = []
        self._parts: list[range] = []

    def begin(self, part_B: torch.Tensor) -> None:
        """Take the bytes of the next part for a source."""
        self._parts.append(range(part_B.data_ptr(), part_B.data_ptr() + len(part_B)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in this block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def is_repeatable(self) -> bool:
        """Whether it saw copies only, of which none overwrites what another call has written."""
        written = [copy.target for _, copy in self._copies] + self._constants
        ranges = sorted(_range_of(tensor) for tensor in written if tensor.numel())
        pairs = pairwise(ranges)
        return self._is_pure and all(first[1] <= second[0] for first, second in pairs)

    def by_part(self) -> Mapping[int, Sequence[_Group]]:
        """The copies of each part, in groups."""
        groups: dict[int, list[list[_Copy]]] = {}
        last: dict[object, list[_Copy]] = {}
        for number, copy in self._copies:
            is_plain = copy.target.is_contiguous() and copy.target.stride() == copy.stride
            alike = number, copy.target.dtype, copy.dtype, copy.target.device, is_plain
            group = last.get(alike, [])
            if not group or sum(other.target.nbytes for other in group) + copy.target.nbytes > _GROUP_BYTES:
                group = last[alike] = []
                groups.setdefault(number, []).append(group)
            group.append(copy)
        return {number: [*map(_Group, copies)] for number, copies in groups.items()}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call an operator, and record it."""
        del types
        result: object = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        if func is _COPY:
            self._add(args[0], args[1])
        elif func in _CONSTANT and isinstance(args[0], torch.Tensor):
            self._constants.append(args[0])
        elif func._schema.is_mutable or not _is_view(result, args):
            self._is_pure = False
        return result

    def _add(self, target: object, source: object) -> None:
        assert isinstance(target, torch.Tensor)
        assert isinstance(source, torch.Tensor)
        start = source.data_ptr()
        # The latest: memory of an earlier one may have been given to it.
        numbers = [number for number, part in enumerate(self._parts) if start in part]
        if target.shape != source.shape or not (numbers or not source.numel()):
            self._is_pure = False
        elif numbers:
            number = numbers[-1]
            begin = (start - self._parts[number].start) // source.itemsize
            self._copies.append((number, _Copy(target, source.dtype, begin, source.stride())))


def _is_view(result: object, args: Sequence[object]) -> bool:
    """Whether an operator has only looked at the memory of its arguments in another way."""
    results = result if isinstance(result, (list, tuple)) else [result]
    storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
    return all(
        isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in storages
        for tensor in results
    )


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first byte of a tensor to the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize
