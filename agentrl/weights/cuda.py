"""Memory of a GPU that another process can map.

torch's allocator may hand out expandable segments, which CUDA's IPC handles do not cover, and it shares one
allocation among tensors. Weights for other processes are therefore in allocations of their own, made by the
CUDA driver (`libcuda.so.1`), whose interface is the same under every version of torch. Only a process that
computes on a GPU calls what is here: it uses torch's context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from agentrl.types.seams import DeviceHandle

_GRANULE = 2 << 20
"""The driver cuts smaller allocations out of one block, and an IPC handle would share all of that block."""

_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. code: its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        super().__init__(f"{call}: {(name.value or b'unknown error').decode()} ({code})")
        self.code = code


class CudaMemory:
    """Memory of a GPU, until `free`; its contents are undefined at first.

    device: a GPU with its number. bytes_B: uint8, on the device; no part of it may be used after `free`.
    handle: for other processes.

    Raises:
        MemoryError: the GPU does not have so much.
        CudaError: the driver refused, or makes no handles, as on some virtual machines.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device, self._address = device, ctypes.c_uint64()
        size = -(-max(num_bytes, 1) // _GRANULE) * _GRANULE
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        with _context(device):
            try:
                _call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(size))
            except CudaError as error:
                if error.code == _OUT_OF_MEMORY:
                    raise MemoryError(str(error)) from None
                raise
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), self._address)
            except CudaError:
                _call("cuMemFree_v2", self._address)
                raise
        storage = torch._C._construct_storage_from_data_pointer(self._address.value, device, num_bytes)
        self.bytes_B: Tensor = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self.handle = DeviceHandle(num_bytes, bytes(handle).hex(), uuid_of(device))

    def free(self) -> None:
        """Give the memory back; what a process has mapped stays until it is unmapped there."""
        address, self._address = self._address, ctypes.c_uint64()
        if address.value:
            self.bytes_B = self.bytes_B.new_empty(0)
            # A kernel that was launched before may still use it.
            torch.cuda.synchronize(self._device)
            with _context(self._device):
                _call("cuMemFree_v2", address)


def uuid_of(device: torch.device) -> str:
    """What names a card in every process, whatever number it has there."""
    return str(torch.cuda.get_device_properties(device).uuid)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Call the driver. Every argument has its type of C, and every call returns a CUresult."""
    code: int = _driver()[name](*arguments)
    if code:
        raise CudaError(name, code)


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Have the context that torch uses for a device be that of this thread."""
    torch.cuda.init()
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device.index))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", number)
