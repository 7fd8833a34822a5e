"""Loads weights out of shared files inside an SGLang scheduler, and tells what the model holds afterwards.

SGLang calls `load` where it was started with `--custom-weight-loader agentrl_sglang.load` and this folder is
on its PYTHONPATH. It is standard library and torch alone, for nothing of ours is installed there.

A request is JSON in the bytes of one tensor:

    {"action": "load", "reply": PATH, "file": PATH, "whole": true,
     "tensors": [[name, shape, dtype, offset], ..]}
    {"action": "read", "reply": PATH, "tensors": [[name, shape, dtype], ..]}

The reply goes into a file that the sender made: {"error": null, "tensors": {name: [dtype, CRC-32 of bytes]}}.
Whoever reaches the server may send a request, so both files have to have PREFIX before their names.
`whole`: this process holds whole tensors (no tensor parallelism), so their shapes are checked before the
first one is loaded; without it, what is told is what came in the file. A name under `tensors` is null where
the model keeps the tensor in a form that is not known here.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

PREFIX = "agentrl-weights-"
"""What the names of a sender's files begin with. No others are opened."""

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters of SGLang, and the tensors of a checkpoint that lie in them, one below the other."""
_EXPERTS = ".experts."


class Model(Protocol):
    """What is used of SGLang's models."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, by SGLang's names."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers, by SGLang's names."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules, by SGLang's names."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Copy tensors of a checkpoint into the parameters."""


class _Sent(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def load(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what a request asks for. Never raises, for that would end the scheduler: failures are replies."""
    with _Reply() as reply:
        asked = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
        reply.path = str(asked["reply"])
        sent = [_sent(*one) for one in asked["tensors"]]
        places = _Places(model, {one.name: one.shape for one in sent})
        if asked["action"] == "load":
            whole = bool(asked["whole"])
            if whole:
                places.check(sent)
            arrived = list(_mapped(str(asked["file"]), sent))
            model.load_weights(arrived)
            reply.tensors = {} if whole else {name: _told(tensor) for name, tensor in arrived}
        else:
            reply.tensors = {one.name: _told(places.of(one)) for one in sent}


class _Reply:
    """Writes how its block ended. An exception ends here; the scheduler has to live."""

    def __init__(self) -> None:
        self.path = ""
        self.tensors: dict[str, tuple[str, int] | None] = {}

    def __enter__(self) -> _Reply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False
        told = {
            "error": None if kind is None else f"{kind.__name__}: {error}"[:500],
            "tensors": {} if kind is not None else self.tensors,
        }
        # Where it cannot be written, the sender finds no reply, and knows as much. A path may be none at all.
        with suppress(OSError, ValueError), os.fdopen(_opened(self.path, os.O_WRONLY), "w") as file:
            file.truncate()
            json.dump(told, file)
        return True


class _Places:
    """Where a model keeps the tensors of a checkpoint. shapes: of the tensors that are asked about."""

    def __init__(self, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._kept = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self._modules = dict(model.named_modules())
        self._shapes = shapes

    def check(self, sent: Iterable[_Sent]) -> None:
        for one in sent:
            self.of(one)

    def of(self, sent: _Sent) -> torch.Tensor | None:
        """The part of a parameter that is this tensor; None = an expert's, laid out in ways of their own."""
        start, kept = 0, self._kept.get(sent.name)
        if kept is None:
            start, kept = self._fused(sent.name)
        if kept is None:
            if _EXPERTS in sent.name:
                return None
            raise ValueError(f"the server's model has no tensor {sent.name}; send the model that it serves")
        part = kept.detach()[start:] if kept.dim() else kept.detach()
        if part.dim() != len(sent.shape) or any(a < b for a, b in zip(part.shape, sent.shape, strict=True)):
            raise ValueError(f"{sent.name} came as {sent.shape}, the server's model has {tuple(kept.shape)}")
        # Vocabularies are padded at their end, and on CPUs whatever does not fit into blocks of 64.
        return part[tuple(slice(size) for size in sent.shape)]

    def _fused(self, name: str) -> tuple[int, torch.Tensor | None]:
        """The parameter that holds a tensor beside others, and the row where it begins."""
        for fused, parts in _FUSED.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    owner, _, kind = name.replace(f".{part}.", f".{fused}.").rpartition(".")
                    above = [name.replace(f".{part}.", f".{other}.") for other in parts[:number]]
                    return self._start(owner, above), self._kept.get(f"{owner}.{kind}")
        return 0, None

    def _start(self, owner: str, above: Sequence[str]) -> int:
        """How many rows lie above a tensor, the padding of those above it included."""
        sizes = getattr(self._modules.get(owner), "output_partition_sizes", None)
        if isinstance(sizes, list):
            return sum(sizes[: len(above)])
        return sum(self._shapes[other][0] for other in above if other in self._shapes)


def _sent(name: str, shape: Sequence[int], dtype: str, offset: int = 0) -> _Sent:
    known = getattr(torch, dtype, None)
    if not isinstance(known, torch.dtype) or any(size < 0 for size in shape) or offset < 0:
        raise ValueError(f"{name} has no such dtype, shape or offset: {dtype}, {shape}, {offset}")
    return _Sent(name, tuple(shape), known, offset)


def _mapped(path: str, sent: Iterable[_Sent]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that share memory with a file. It may be unlinked meanwhile."""
    descriptor = _opened(path, os.O_RDONLY)
    try:
        # A private mapping that could be written to: torch warns of others.
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for one in sent:
        count = 1
        for size in one.shape:
            count *= size
        if one.offset + count * one.dtype.itemsize > len(memory):
            raise ValueError(f"{one.name} reaches beyond the end of the file")
        if count == 0:
            yield one.name, torch.empty(one.shape, dtype=one.dtype)
            continue
        flat = torch.frombuffer(memory, dtype=one.dtype, count=count, offset=one.offset)
        yield one.name, flat.reshape(one.shape)


def _opened(path: str, flags: int) -> int:
    """A descriptor of a file that exists, is named as a sender's are, and is of this user.

    A request names paths, and would otherwise reach all that its user has. Nothing is changed by opening: a
    file that is refused stays as it is.
    """
    if not os.path.basename(path).startswith(PREFIX):
        raise PermissionError(f"{path} is no file of a sender: its name does not begin with {PREFIX}")
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is no file of this user")
    return descriptor


def _told(tensor: torch.Tensor | None) -> tuple[str, int] | None:
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), zlib.crc32(flat.numpy().data)
