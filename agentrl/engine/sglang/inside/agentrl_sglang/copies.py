"""The copies by which a model loads its weights: recorded once, and repeated from then on.

SGLang loads a checkpoint tensor by tensor, each by some lines of Python, which takes a server with a card
longer than the copies do. What `load_weights` does with the first version is recorded: if it copied parts of
the sender's memory to places of the model, and did nothing else, the same copies are made of every later
version with the same layout, all of a part at once. Where it did anything else (a number that is derived from
a weight, a conversion), every version is loaded as the first one was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

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
    """target: in the model. offset: of the source, from the start of its part (bytes)."""

    target: torch.Tensor
    dtype: torch.dtype
    offset: int
    stride: tuple[int, ...]

    def source_in(self, part_B: torch.Tensor) -> torch.Tensor:
        start = (part_B.storage_offset() + self.offset) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=part_B.device)
        return empty.set_(part_B.untyped_storage(), start, self.target.shape, self.stride)


class _Copies(NamedTuple):
    """by_part: groups of copies that one call makes, for each part. unread: see `load_device`."""

    layout: Layout
    memory: Sequence[int]
    by_part: Mapping[int, Sequence[Sequence[_Copy]]]
    unread: dict[str, tuple[str, int] | None]

    def repeat(self, number: int, part_B: torch.Tensor) -> None:
        """Make the copies of a part, which has the bytes of a later version. Nothing waits for them."""
        for group in self.by_part.get(number, ()):
            torch._foreach_copy_([copy.target for copy in group], [copy.source_in(part_B) for copy in group])

    def differing(self, number: int, part_B: torch.Tensor) -> Iterator[torch.Tensor]:
        """Whether the model holds other bits than the part has, in truth values on the device."""
        for group in self.by_part.get(number, ()):
            pairs = [(copy.target, copy.source_in(part_B)) for copy in group]
            if len(pairs) == 1:
                yield differs(*pairs[0])
            else:
                targets, sources = (torch.cat([bits(t).reshape(-1) for t in side]) for side in _sides(pairs))
                yield (targets != sources).any()


def _sides(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Targets, and sources in their dtypes."""
    return [target for target, _ in pairs], [source.to(target.dtype) for target, source in pairs]


_known: WeakKeyDictionary[Model, _Copies] = WeakKeyDictionary()


def recorded(model: Model, layout: Layout) -> _Copies | None:
    """The copies that load this layout; None = it was not loaded yet, or the model has moved since."""
    copies = _known.get(model)
    if copies is None or copies.layout != layout or copies.memory != _memory_of(model):
        return None
    return copies


def remember(
    model: Model, layout: Layout, recording: Recording, unread: dict[str, tuple[str, int] | None]
) -> None:
    """Keep the copies of a call of `load_weights` that was right, if repeating them would be."""
    _known.pop(model, None)
    if recording.is_repeatable:
        _known[model] = _Copies(layout, _memory_of(model), recording.by_part(), unread)


def _memory_of(model: Model) -> list[int]:
    named = (*model.named_parameters(), *model.named_buffers())
    return [tensor.data_ptr() for _, tensor in named]


class Recording(TorchDispatchMode):
    """Records what its block does with parts of a sender's memory, which `begin` announces one by one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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

    def by_part(self) -> Mapping[int, Sequence[Sequence[_Copy]]]:
        """The copies of each part, in groups that torch copies by one kernel, where it can."""
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
        return groups

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
            offset = start - self._parts[number].start
            self._copies.append((number, _Copy(target, source.dtype, offset, source.stride())))


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
