"""Tensors as a request names them, and the sender's files that hold their bytes."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

PREFIX = "agentrl-weights-"
"""The prefix of the names of a sender's files. No others are opened."""

BUCKET = "/memfd:agentrl-bucket (deleted)"
"""What Linux calls the memory of a sender that has no name in the file system."""

_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class SentTensor(NamedTuple):
    """offset: of its first byte, in its file or memory (bytes)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def parse_tensor(name: str, shape: Sequence[int], dtype: str, offset: int = 0) -> SentTensor:
    """A tensor of a request. Raises ValueError: it can have no such dtype, shape or offset."""
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or any(size < 0 for size in shape) or offset < 0:
        raise ValueError(f"{name} has no such dtype, shape or offset: {dtype}, {shape}, {offset}")
    return SentTensor(name, tuple(shape), torch_dtype, offset)


def size_of(tensor: SentTensor) -> int:
    """Bytes of a tensor."""
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size


def map_tensors(path: str, sent: Iterable[SentTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that share memory with a file; it may be unlinked while they are in use."""
    descriptor = open_file(path, os.O_RDONLY)
    try:
        # A private, writable mapping: torch warns of read-only memory.
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for tensor in sent:
        if tensor.offset + size_of(tensor) > len(memory):
            raise ValueError(f"{tensor.name} reaches beyond the end of the file")
        count = size_of(tensor) // tensor.dtype.itemsize
        if count == 0:
            yield tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=tensor.offset)
        yield tensor.name, flat.reshape(tensor.shape)


def open_file(path: str, flags: int) -> int:
    """A descriptor of an existing file with a sender's prefix that belongs to this user.

    A request contains paths, and could otherwise access every file of the user. Opening changes nothing: a
    refused file stays as it is.
    """
    if _DESCRIPTOR.fullmatch(path):
        return _open_bucket(path, flags)
    if not os.path.basename(path).startswith(PREFIX):
        raise PermissionError(f"{path} is no file of a sender: its name does not begin with {PREFIX}")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is no file of this user")
    return descriptor


def _open_bucket(path: str, flags: int) -> int:
    """A descriptor of a sender's memory, which may only be read."""
    descriptor = -1
    if flags == os.O_RDONLY and os.readlink(path) == BUCKET:
        # Another file may be there by now: opening one must not wait, and it is not read.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.readlink(f"/proc/self/fd/{descriptor}") == BUCKET:
            return descriptor
        os.close(descriptor)
    raise PermissionError(f"{path} is no memory of a sender")
