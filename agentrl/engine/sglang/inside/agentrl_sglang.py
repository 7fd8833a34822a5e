"""Loads weights from shared files inside an SGLang scheduler, and reports CRCs of the model's tensors.

SGLang calls `load` where it was started with `--custom-weight-loader agentrl_sglang.load` and this directory
is on its PYTHONPATH. The module uses only torch and the standard library, because agentrl is not installed
there.

A request is JSON in the bytes of one tensor:

    {"action": "load", "reply": PATH, "file": PATH, "whole": true,
     "tensors": [[name, shape, dtype, offset], ..]}
    {"action": "load_all", "reply": PATH, "files": [[PATH, [[name, shape, dtype, offset], ..]], ..]}
    {"action": "load_device", "reply": PATH, "whole": true,
     "memory": {"num_bytes": N, "cuda": HEX, "device": UUID, "path": ""},
     "parts": [[start, end, content hash, [[name, shape, dtype, offset], ..]], ..]}
    {"action": "read", "reply": PATH, "tensors": [[name, shape, dtype], ..]}

The reply is written to a file of the sender: {"error": null, "tensors": {name: [dtype, CRC-32 of bytes]}}.
Any client of the server may send a request, so the names of both files must have PREFIX, but for a FILE that
is memory without a name: one that a process of this user has open under the name BUCKET. `whole`: this
process holds complete tensors (no tensor parallelism), so all shapes are checked before the first one is
loaded; without it, the CRCs are those of the tensors in the file. A name under `tensors` is null where the
model's layout of the tensor is not supported here.

`load_all` loads complete tensors of several files, then compares every one in the model with its file, bit
for bit. Nothing is served meanwhile, and a CRC would take several times as long. Only tensors that cannot be
compared are in its reply.

`load_device` loads tensors out of the memory of a card, by a handle of CUDA's IPC, or out of shared memory,
by its path. On the sender's own card they are read where they are; to another one each part is copied first.
The hash of every part is compared with the sender's, and with `whole` every tensor in the model with the
sent one. Nothing is unpickled: a handle is 64 bytes, and no more is read than the allocation holds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

PREFIX = "agentrl-weights-"
"""The prefix of the names of a sender's files. No others are opened."""

BUCKET = "/memfd:agentrl-bucket (deleted)"
"""What Linux calls the memory of a sender that has no name in the file system."""

_DESCRIPTOR = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused parameters of SGLang, and the checkpoint tensors whose rows they stack."""
_EXPERTS = ".experts."
_HANDLE = re.compile(r"[0-9a-f]{128}")
_DRIVER = "libcuda.so.1"
_PEER_ACCESS = 1
_COMPARED = 64 << 20
"""Numbers that are compared at once (count): each needs a byte."""
_COLUMNS = 4096
_CHUNK_BYTES = 64 << 20
_GOLDEN, _MIX = -7046029254386353131, -2960836687051489901
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Model(Protocol):
    """The methods of SGLang's models that are used here."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, by SGLang's names."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers, by SGLang's names."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules, by SGLang's names."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Copy tensors of a checkpoint into the parameters."""


class _SentTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def load(model: Model, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a request. Never raises, because that would crash the scheduler: errors go into the reply."""
    with _ReplyFile() as reply:
        request = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
        reply.path = str(request["reply"])
        if request["action"] == "load_all":
            files = {
                str(path): [_parse_tensor(*fields) for fields in tensors]
                for path, tensors in request["files"]
            }
            reply.tensors = _load_all(model, files)
            return
        if request["action"] == "load_device":
            parts = [_parse_part(*fields) for fields in request["parts"]]
            memory = _parse_memory(**request["memory"])
            reply.tensors = _load_device(model, memory, parts, whole=bool(request["whole"]))
            return
        sent = [_parse_tensor(*fields) for fields in request["tensors"]]
        locations = _Locations(model, {tensor.name: tensor.shape for tensor in sent})
        if request["action"] == "load":
            complete = bool(request["whole"])
            if complete:
                locations.check(sent)
            loaded = list(_map_tensors(str(request["file"]), sent))
            model.load_weights(loaded)
            reply.tensors = {} if complete else {name: _crc_of(tensor) for name, tensor in loaded}
        else:
            reply.tensors = {tensor.name: _crc_of(locations.of(tensor)) for tensor in sent}


def _load_all(model: Model, files: Mapping[str, Sequence[_SentTensor]]) -> dict[str, tuple[str, int] | None]:
    """Load the tensors of all files, by path; the result has those that cannot be compared afterwards."""
    sent = [tensor for tensors in files.values() for tensor in tensors]
    locations = _Locations(model, {tensor.name: tensor.shape for tensor in sent})
    locations.check(sent)
    loaded = [pair for path, tensors in files.items() for pair in _map_tensors(path, tensors)]
    model.load_weights(loaded)
    unread: dict[str, tuple[str, int] | None] = {}
    for tensor, (name, data) in zip(sent, loaded, strict=True):
        part = locations.of(tensor)
        if part is None:
            unread[name] = None
        elif not torch.equal(_bits(part), _bits(data.to(part.device, part.dtype))):
            raise ValueError(f"the model holds another {name} than was sent")
    return unread


class _Memory(NamedTuple):
    """Memory of a sender: of a card by an IPC handle, or a file in shared memory."""

    num_bytes: int
    handle: bytes
    device: str
    path: str


class _Part(NamedTuple):
    """Some tensors in the sender's memory, from `start` to `end`."""

    start: int
    end: int
    content_hash: int
    tensors: list[_SentTensor]


def _load_device(
    model: Model, memory: _Memory, parts: Sequence[_Part], *, whole: bool
) -> dict[str, tuple[str, int] | None]:
    """Load the tensors of some memory; the result has those that cannot be compared afterwards."""
    for part in parts:
        _check_part(part, memory.num_bytes)
    sent = [tensor for part in parts for tensor in part.tensors]
    locations = _Locations(model, {tensor.name: tensor.shape for tensor in sent})
    if whole:
        locations.check(sent)
    device = next(parameter.device for _, parameter in model.named_parameters())
    unread: dict[str, tuple[str, int] | None] = {}
    flags: list[tuple[str, torch.Tensor]] = []
    with _mapped_memory(memory, device) as (bytes_B, is_near):
        model.load_weights(_received(bytes_B, parts, flags, is_near=is_near))
        # Only now: loading one tensor may have changed another.
        for part in parts if whole else ():
            pairs = zip(part.tensors, _tensors_in(bytes_B[part.start : part.end], part), strict=True)
            for tensor, (name, data) in pairs:
                place = locations.of(tensor)
                if place is None:
                    unread[name] = None
                else:
                    flags.append((f"the model holds another {name}", _differs(place, data)))
        # The device is waited for once, while the memory is mapped.
        differs = torch.stack([flag for _, flag in flags]).tolist() if flags else []
    wrong = next((what for (what, _), differing in zip(flags, differs, strict=True) if differing), None)
    if wrong is not None:
        raise ValueError(f"{wrong} than was sent")
    return unread


def _received(
    bytes_B: torch.Tensor, parts: Sequence[_Part], flags: list[tuple[str, torch.Tensor]], *, is_near: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors; flags: gets whether a part has other bytes than its hash is of."""
    for part in parts:
        part_B = bytes_B[part.start : part.end]
        if not is_near:
            part_B = part_B.clone()
        flags.append(("the memory holds other bytes", content_hash(part_B) != part.content_hash))
        yield from _tensors_in(part_B, part)


def _check_part(part: _Part, num_bytes: int) -> None:
    if not 0 <= part.start <= part.end <= num_bytes:
        raise ValueError(f"a part reaches from {part.start} to {part.end} in {num_bytes} bytes")
    for tensor in part.tensors:
        is_inside = part.start <= tensor.offset and tensor.offset + _size_of(tensor) <= part.end
        size = tensor.dtype.itemsize
        if not is_inside or tensor.offset % size or part.start % size:
            raise ValueError(f"{tensor.name} is not in its part, or not aligned")


def _size_of(tensor: _SentTensor) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size


def _tensors_in(part_B: torch.Tensor, part: _Part) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in part.tensors:
        start = tensor.offset - part.start
        flat_B = part_B[start : start + _size_of(tensor)]
        yield tensor.name, flat_B.view(tensor.dtype).view(tensor.shape)


def _differs(place: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Whether a tensor of the model has other bits than were sent; nothing waits for it."""
    if not data.dim():
        place, data = place.view(1), data.view(1)
    rows = max(1, _COMPARED // max(1, data[0].numel() if len(data) else 1))
    flag = torch.zeros((), dtype=torch.bool, device=place.device)
    for mine, sent in zip(place.split(rows), data.split(rows), strict=True) if data.numel() else ():
        flag |= (_bits(mine) != _bits(sent.to(mine.device, mine.dtype))).any()
    return flag


def content_hash(bytes_B: torch.Tensor) -> torch.Tensor:
    """The sender's hash of some bytes, computed on their device: see `agentrl.weights.device`."""
    keys_C, sums = _mixed(_GOLDEN * torch.arange(1, _COLUMNS + 1, device=bytes_B.device)) | 1, []
    for start in range(0, len(bytes_B), _CHUNK_BYTES):
        chunk_B = bytes_B[start : start + _CHUNK_BYTES]
        whole = len(chunk_B) // (4 * _COLUMNS) * 4 * _COLUMNS
        sums.append((chunk_B[:whole].view(torch.int32).view(-1, _COLUMNS) * keys_C).sum(1))
        if whole < len(chunk_B):
            tail_B = chunk_B.new_zeros(4 * _COLUMNS)
            tail_B[: len(chunk_B) - whole] = chunk_B[whole:]
            sums.append((tail_B.view(torch.int32).view(1, _COLUMNS) * keys_C).sum(1))
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=bytes_B.device)
    sums_R = torch.cat(sums)
    return _mixed(sums_R + _GOLDEN * torch.arange(1, len(sums_R) + 1, device=sums_R.device)).sum()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * _MIX
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@contextmanager
def _mapped_memory(memory: _Memory, device: torch.device) -> Iterator[tuple[torch.Tensor, bool]]:
    """The bytes of a sender's memory, for the block, and whether they are this device's own."""
    if memory.path:
        yield _file_bytes(memory), True
        return
    if device.type != "cuda":
        raise PermissionError("this server computes on no card, and cannot map the memory of one")
    properties = torch.cuda.get_device_properties(device)
    with _driver_context(device) as driver:
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        handle = _IpcHandle.from_buffer_copy(memory.handle)
        _check(driver, "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, _PEER_ACCESS)
        try:
            ends = ctypes.byref(base), ctypes.byref(size)
            _check(driver, "cuMemGetAddressRange_v2", *ends, address)
            if base.value + size.value < address.value + memory.num_bytes:
                raise ValueError(f"the handle is of {size.value} bytes, not of {memory.num_bytes}")
            storage = torch._C._construct_storage_from_data_pointer(address.value, device, memory.num_bytes)
            bytes_B = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            yield bytes_B, memory.device == str(properties.uuid)
        finally:
            torch.cuda.synchronize(device)
            _check(driver, "cuIpcCloseMemHandle", address)


def _file_bytes(memory: _Memory) -> torch.Tensor:
    descriptor = _open_file(memory.path, os.O_RDONLY)
    try:
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    if len(data) < memory.num_bytes:
        raise ValueError(f"the file has {len(data)} bytes, not {memory.num_bytes}")
    return torch.frombuffer(data, dtype=torch.uint8, count=memory.num_bytes)


class _IpcHandle(ctypes.Structure):
    """A handle of CUDA's IPC, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@contextmanager
def _driver_context(device: torch.device) -> Iterator[ctypes.CDLL]:
    """The driver, with the context that torch uses for a device as that of this thread."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise PermissionError(f"{_DRIVER} cannot be loaded: {error}") from error
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver, "cuDeviceGet", ctypes.byref(number), ctypes.c_int(device.index))
    _check(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        _check(driver, "cuCtxPushCurrent_v2", context)
        try:
            yield driver
        finally:
            _check(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _check(driver, "cuDevicePrimaryCtxRelease_v2", number)


def _check(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call the driver. An error is one of access: the sender then takes another way."""
    code: int = driver[name](*arguments)
    if code:
        raise PermissionError(f"{name} failed with code {code} of CUDA's driver")


def _parse_memory(num_bytes: int, cuda: str, device: str, path: str) -> _Memory:
    if type(num_bytes) is not int or num_bytes < 0 or bool(cuda) == bool(path):
        raise ValueError("the memory has no size, or not exactly one of a handle and a path")
    if cuda and not _HANDLE.fullmatch(cuda):
        raise ValueError("the handle is not 64 bytes in hexadecimal digits")
    return _Memory(num_bytes, bytes.fromhex(cuda), str(device), str(path))


def _parse_part(
    start: int, end: int, content_hash: int, tensors: Sequence[tuple[str, Sequence[int], str, int]]
) -> _Part:
    if any(type(number) is not int for number in (start, end, content_hash)):
        raise ValueError("a part has a start, an end and a hash, which are integers")
    return _Part(start, end, content_hash, [_parse_tensor(*fields) for fields in tensors])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: a NaN equals itself, and 0 does not equal -0."""
    return tensor.view(_INTEGERS[tensor.itemsize])


class _ReplyFile:
    """Writes the result of its block to a file; suppresses exceptions, which would crash the scheduler."""

    def __init__(self) -> None:
        self.path = ""
        self.tensors: dict[str, tuple[str, int] | None] = {}

    def __enter__(self) -> _ReplyFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is not None and not issubclass(kind, Exception):
            return False
        reply = {
            "error": None if kind is None else f"{kind.__name__}: {error}"[:500],
            "tensors": {} if kind is not None else self.tensors,
        }
        # Where the reply cannot be written, the sender detects the empty file. The path may be invalid.
        with suppress(OSError, ValueError), os.fdopen(_open_file(self.path, os.O_WRONLY), "w") as file:
            file.truncate()
            json.dump(reply, file)
        return True


class _Locations:
    """Maps checkpoint tensors to slices of a model's parameters. shapes: of the requested tensors."""

    def __init__(self, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._parameters = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self._modules = dict(model.named_modules())
        self._shapes = shapes

    def check(self, sent: Iterable[_SentTensor]) -> None:
        for tensor in sent:
            self.of(tensor)

    def of(self, sent: _SentTensor) -> torch.Tensor | None:
        """The slice of a parameter with this tensor; None = an expert's, whose layout is not supported."""
        start, parameter = 0, self._parameters.get(sent.name)
        if parameter is None:
            start, parameter = self._fused(sent.name)
        if parameter is None:
            if _EXPERTS in sent.name:
                return None
            raise ValueError(f"the server's model has no tensor {sent.name}; send the model that it serves")
        part = parameter.detach()[start:] if parameter.dim() else parameter.detach()
        if part.dim() != len(sent.shape) or any(a < b for a, b in zip(part.shape, sent.shape, strict=True)):
            raise ValueError(
                f"{sent.name} came as {sent.shape}, the server's model has {tuple(parameter.shape)}"
            )
        # Vocabularies are padded at their end, and on CPUs every size that is no multiple of 64.
        return part[tuple(slice(size) for size in sent.shape)]

    def _fused(self, name: str) -> tuple[int, torch.Tensor | None]:
        """The fused parameter of a tensor, and its first row there."""
        for fused, parts in _FUSED.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    owner, _, kind = name.replace(f".{part}.", f".{fused}.").rpartition(".")
                    above = [name.replace(f".{part}.", f".{other}.") for other in parts[:number]]
                    return self._start(owner, above), self._parameters.get(f"{owner}.{kind}")
        return 0, None

    def _start(self, owner: str, above: Sequence[str]) -> int:
        """The first row of a tensor in a fused parameter, after the padded rows of the tensors above it."""
        sizes = getattr(self._modules.get(owner), "output_partition_sizes", None)
        if isinstance(sizes, list):
            return sum(sizes[: len(above)])
        return sum(self._shapes[other][0] for other in above if other in self._shapes)


def _parse_tensor(name: str, shape: Sequence[int], dtype: str, offset: int = 0) -> _SentTensor:
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype) or any(size < 0 for size in shape) or offset < 0:
        raise ValueError(f"{name} has no such dtype, shape or offset: {dtype}, {shape}, {offset}")
    return _SentTensor(name, tuple(shape), torch_dtype, offset)


def _map_tensors(path: str, sent: Iterable[_SentTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that share memory with a file; it may be unlinked while they are in use."""
    descriptor = _open_file(path, os.O_RDONLY)
    try:
        # A private, writable mapping: torch warns of read-only memory.
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    for tensor in sent:
        if tensor.offset + _size_of(tensor) > len(memory):
            raise ValueError(f"{tensor.name} reaches beyond the end of the file")
        count = _size_of(tensor) // tensor.dtype.itemsize
        if count == 0:
            yield tensor.name, torch.empty(tensor.shape, dtype=tensor.dtype)
            continue
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=tensor.offset)
        yield tensor.name, flat.reshape(tensor.shape)


def _open_file(path: str, flags: int) -> int:
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


def _crc_of(tensor: torch.Tensor | None) -> tuple[str, int] | None:
    if tensor is None:
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), zlib.crc32(flat.numpy().data)
