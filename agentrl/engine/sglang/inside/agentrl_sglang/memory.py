"""Loads tensors out of the memory of a card, or out of memory that stands for one."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .copies import CopyRecorder, recorded, remember
from .device import differs, hashes_of, mapped_card, row_sums
from .drafts import Share
from .locations import Locations, Model
from .tensors import SentTensor, open_file, parse_tensor, size_of

RawPart = tuple[int, int, int, Sequence[tuple[str, Sequence[int], str, int]]]
"""A part as a request has it; nothing of it is checked yet."""
_HANDLE = re.compile(r"[0-9a-f]{128}")


class Memory(NamedTuple):
    """Memory of a sender: of a card by an IPC handle, or a file in shared memory."""

    num_bytes: int
    handle: bytes
    device: str
    path: str


class Part(NamedTuple):
    """Some tensors in the sender's memory, from `start` to `end`."""

    start: int
    end: int
    content_hash: int
    tensors: list[SentTensor]


def load_device(
    model: Model, memory: Memory, parts: Sequence[RawPart], share: Share, *, whole: bool
) -> dict[str, tuple[str, int] | None]:
    """Load the tensors of some memory; the result has those that cannot be compared afterwards."""
    # Without the hashes: what was parsed and checked once, with the first version.
    ahead, spans = share.ahead, ((start, end, tensors) for start, end, _, tensors in parts)
    layout = [memory.num_bytes, whole, ahead, *spans]
    copies = recorded(model, layout)
    if copies is None:
        return _load_first(model, memory, [_parse_part(*fields) for fields in parts], layout, share)
    checks = _Checks()
    with _mapped_memory(memory, _device_of(model)) as (bytes_B, is_near):
        for number, (start, end, expected, _) in enumerate(parts):
            part_B = checks.read(bytes_B[start:end], expected, is_near=is_near)
            for group in copies.by_part.get(number, ()):
                checks.add("the model holds other weights", group.repeat(part_B))
        checks.done()
    return copies.unread


class _Checks:
    """What is compared on the device, which is waited for once."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._expected: list[int] = []
        self._names: list[str] = []
        self._flags: list[torch.Tensor] = []

    def read(self, part_B: torch.Tensor, expected: int, *, is_near: bool) -> torch.Tensor:
        """The bytes of a part: where they are, or a copy if that is another card. expected: their hash."""
        if not is_near:
            part_B = part_B.clone()
        self._sums.append(row_sums(part_B))
        self._expected.append(expected)
        return part_B

    def add(self, what: str, is_wrong: torch.Tensor) -> None:
        """Something is wrong where a truth value on the device is true."""
        self._names.append(what)
        self._flags.append(is_wrong)

    def done(self) -> None:
        """Wait for all of it, while the memory is mapped. Raises ValueError: something is wrong."""
        numbers = [hashes_of(self._sums)] if self._sums else []
        if self._flags:
            numbers.append(torch.stack(self._flags).long())
        found = torch.cat(numbers).tolist() if numbers else []
        count = len(self._expected)
        if found[:count] != self._expected:
            raise ValueError("the memory holds other bytes than was sent")
        wrong = next((what for what, flag in zip(self._names, found[count:], strict=True) if flag), None)
        if wrong is not None:
            raise ValueError(f"{wrong} than was sent")


def _load_first(
    model: Model, memory: Memory, parts: Sequence[Part], layout: Sequence[object], share: Share
) -> dict[str, tuple[str, int] | None]:
    """Load a layout as SGLang does, compare all tensors with those that were sent, remember the copies."""
    for part in parts:
        _check_part(part, memory.num_bytes)
    parts = [part._replace(tensors=[t for t in part.tensors if share.holds(t.name)]) for part in parts]
    sent = share.of(tensor for part in parts for tensor in part.tensors)
    locations = Locations(model, {tensor.name: tensor.shape for tensor in sent})
    _, whole, *_ = layout
    if whole:
        locations.check(sent)
    unread: dict[str, tuple[str, int] | None] = {}
    checks = _Checks()
    with _mapped_memory(memory, _device_of(model)) as (bytes_B, is_near):
        recording = CopyRecorder()
        with recording:
            model.load_weights(_received(bytes_B, parts, checks, recording, is_near=is_near))
        # Only now: loading one tensor may have changed another.
        for part in parts if whole else ():
            pairs = zip(part.tensors, _tensors_in(bytes_B[part.start : part.end], part), strict=True)
            for tensor, (name, data) in pairs:
                place = locations.of(tensor._replace(name=share.name_of(name)))
                if place is None:
                    unread[name] = None
                else:
                    checks.add(f"the model holds another {name}", differs(place, data))
        checks.done()
    remember(model, layout, recording, unread)
    return unread


def _device_of(model: Model) -> torch.device:
    return next(parameter.device for _, parameter in model.named_parameters())


def _received(
    bytes_B: torch.Tensor,
    parts: Sequence[Part],
    checks: _Checks,
    recording: CopyRecorder,
    *,
    is_near: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors; checks: gets the bytes of each part, which have a hash."""
    for part in parts:
        with recording.paused():
            bytes_of_part = bytes_B[part.start : part.end]
            part_B = checks.read(bytes_of_part, part.content_hash, is_near=is_near)
        recording.begin(part_B)
        yield from _tensors_in(part_B, part)


def _check_part(part: Part, num_bytes: int) -> None:
    if not 0 <= part.start <= part.end <= num_bytes:
        raise ValueError(f"a part reaches from {part.start} to {part.end} in {num_bytes} bytes")
    for tensor in part.tensors:
        is_inside = part.start <= tensor.offset and tensor.offset + size_of(tensor) <= part.end
        size = tensor.dtype.itemsize
        if not is_inside or tensor.offset % size or part.start % size:
            raise ValueError(f"{tensor.name} is not in its part, or not aligned")


def _tensors_in(part_B: torch.Tensor, part: Part) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in part.tensors:
        start = tensor.offset - part.start
        flat_B = part_B[start : start + size_of(tensor)]
        yield tensor.name, flat_B.view(tensor.dtype).view(tensor.shape)


@contextmanager
def _mapped_memory(memory: Memory, device: torch.device) -> Iterator[tuple[torch.Tensor, bool]]:
    """The bytes of a sender's memory, for the block, and whether they are this device's own."""
    if memory.path:
        yield _file_bytes(memory), True
        return
    with mapped_card(memory.handle, memory.num_bytes, device) as bytes_B:
        yield bytes_B, memory.device == str(torch.cuda.get_device_properties(device).uuid)


def _file_bytes(memory: Memory) -> torch.Tensor:
    descriptor = open_file(memory.path, os.O_RDONLY)
    try:
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    if len(data) < memory.num_bytes:
        raise ValueError(f"the file has {len(data)} bytes, not {memory.num_bytes}")
    return torch.frombuffer(data, dtype=torch.uint8, count=memory.num_bytes)


def parse_memory(num_bytes: int, cuda: str, device: str, path: str) -> Memory:
    """The memory that a request names. Raises ValueError: it names none, or more than one."""
    if type(num_bytes) is not int or num_bytes < 0 or bool(cuda) == bool(path):
        raise ValueError("the memory has no size, or not exactly one of a handle and a path")
    if cuda and not _HANDLE.fullmatch(cuda):
        raise ValueError("the handle is not 64 bytes in hexadecimal digits")
    return Memory(num_bytes, bytes.fromhex(cuda), str(device), str(path))


def _parse_part(
    start: int, end: int, content_hash: int, tensors: Sequence[tuple[str, Sequence[int], str, int]]
) -> Part:
    """A part of a request. Raises ValueError: a number is none."""
    if any(type(number) is not int for number in (start, end, content_hash)):
        raise ValueError("a part has a start, an end and a hash, which are integers")
    return Part(start, end, content_hash, [parse_tensor(*fields) for fields in tensors])
