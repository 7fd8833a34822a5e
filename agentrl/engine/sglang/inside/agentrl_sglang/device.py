"""The memory of a card in a scheduler: mapped by a handle of CUDA's IPC, hashed and compared where it is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DRIVER = "libcuda.so.1"
_PEER_ACCESS = ctypes.c_uint(1)
_COMPARED = 16 << 20
"""Numbers that are compared at once (count): each needs a byte."""
_ROW_BYTES, _COLUMNS = 16384, 16
_BLOCK_BYTES = 64 << 20
_LEAST_ROWS = 32
_GOLDEN, _MIX = -7046029254386353131, -2960836687051489901


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers: a NaN equals itself, and 0 does not equal -0."""
    return tensor.view(INTEGERS[tensor.itemsize])


def differs(place: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Whether a tensor of the model has other bits than were sent; nothing waits for it."""
    if not data.dim():
        place, data = place.view(1), data.view(1)
    rows = max(1, _COMPARED // max(1, data[0].numel() if len(data) else 1))
    flag = torch.zeros((), dtype=torch.bool, device=place.device)
    for mine, sent in zip(place.split(rows), data.split(rows), strict=True) if data.numel() else ():
        flag |= (bits(mine) != bits(sent.to(mine.device, mine.dtype))).any()
    return flag


def row_sums(bytes_B: torch.Tensor) -> torch.Tensor:
    """Of some bytes, on their device, what `hashes_of` makes the sender's hash of; nothing waits for it."""
    keys_CK, weight_C = _keys(bytes_B.device)
    least = _LEAST_ROWS * _ROW_BYTES
    whole = len(bytes_B) // least * least
    blocks = [*bytes_B[:whole].split(_BLOCK_BYTES)] if whole else []
    if whole < len(bytes_B):
        end_B = bytes_B.new_zeros(least)
        end_B[: len(bytes_B) - whole].copy_(bytes_B[whole:])
        blocks.append(end_B)
    if not blocks:
        return torch.zeros(0, dtype=torch.int64, device=bytes_B.device)
    products = [_products(block_B.view(torch.int8).view(-1, _ROW_BYTES), keys_CK) for block_B in blocks]
    return (torch.cat(products) * weight_C).sum(1)


def hashes_of(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sender's hashes of parts, int64 [parts], by their `row_sums`: see `agentrl.weights.device`."""
    counts = [*map(len, sums)]
    numbers = torch.arange(1, max(counts, default=0) + 1, device=sums[0].device)
    places_R = torch.cat([numbers[:count] for count in counts])
    mixed_R = _mixed(torch.cat([*sums]) + _GOLDEN * places_R)
    return torch.stack([part_R.sum() for part_R in mixed_R.split(counts)])


def _products(rows_RK: torch.Tensor, keys_CK: torch.Tensor) -> torch.Tensor:
    """int32 [rows, 16], exact."""
    try:
        return torch._int_mm(rows_RK, keys_CK.t())
    except RuntimeError:
        # A device without such products: the same numbers, one column at a time.
        columns = [(rows_RK.int() * key_K).sum(1, dtype=torch.int32) for key_K in keys_CK]
        return torch.stack(columns, dim=1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * _MIX
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@cache
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    words = _mixed(_GOLDEN * torch.arange(1, _COLUMNS * _ROW_BYTES // 8 + 1, device=device))
    weight_C = _mixed(_MIX * torch.arange(1, _COLUMNS + 1, device=device)) | 1
    return words.view(torch.int8).view(_COLUMNS, _ROW_BYTES) | 1, weight_C


@contextmanager
def mapped_card(handle: bytes, num_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The memory of a card, or of another one that this card reaches, as uint8, until the end of the block.

    Raises:
        PermissionError: it cannot be mapped; the sender then takes another way.
        ValueError: it is smaller.
    """
    if device.type != "cuda":
        raise PermissionError("this server computes on no card, and cannot map the memory of one")
    with _driver_context(device) as driver:
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        by_value = _IpcHandle.from_buffer_copy(handle)
        _check(driver, "cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, _PEER_ACCESS)
        try:
            ends = ctypes.byref(base), ctypes.byref(size)
            _check(driver, "cuMemGetAddressRange_v2", *ends, address)
            if base.value + size.value < address.value + num_bytes:
                raise ValueError(f"the handle is of {size.value} bytes, not of {num_bytes}")
            storage = torch._C._construct_storage_from_data_pointer(address.value, device, num_bytes)
            yield torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        finally:
            torch.cuda.synchronize(device)
            _check(driver, "cuIpcCloseMemHandle", address)


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
