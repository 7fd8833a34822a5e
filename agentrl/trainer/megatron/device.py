"""Megatron-Core on a machine without CUDA: the one place where CUDA is emulated on the CPU.

Megatron hard-codes `device="cuda"`, `.cuda()` and `torch.cuda.current_device()`. Where CUDA is absent,
`emulate_cuda()` patches those functions of torch to return the CPU, for Megatron only: any other caller gets
torch's own result. `queries` counts the emulated calls by their caller.

A run on the CPU tests mathematics, sharding, control flow, files. It does not test streams and their order,
overlap of communication and computation, NCCL, fused kernels, pinned memory, GPU memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import TypeVar

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

_CPU = torch.device("cpu")
_CPU_KWARGS: dict[str, object] = {"device": _CPU, "pin_memory": False}
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")

R = TypeVar("R")

queries: Counter[str] = Counter()
"""Emulated calls by function and caller (count): {"torch.cuda.current_device in megatron.core.utils": 3}."""


def compute_device() -> torch.device:
    """The device that this rank computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


class _NullStream:
    """A stream or an event where all operations are synchronous."""

    def wait_stream(self, other: object) -> None:
        """Return at once: earlier operations are complete."""

    def record(self, stream: object = None) -> None:
        """Record nothing."""

    def wait(self, stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class _NullRngTracker:
    """Megatron's tracker of random states, where nothing is random: weights are loaded, dropout is off."""

    def fork(self, _name: str = "") -> nullcontext[None]:
        """No state to fork."""
        return nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        """No states."""
        return {}

    def set_states(self, _states: dict[str, Tensor]) -> None:
        """No states to restore."""


def emulate_cuda() -> bool:
    """Patch torch to present the CPU to Megatron as a GPU; False where CUDA is available: no patch."""
    if torch.cuda.is_available():
        return False
    if queries["emulating"]:
        return True
    queries["emulating"] = 1
    _patch(torch.cuda, "current_device", lambda: _CPU)
    _patch(torch.cuda, "synchronize", lambda *_: None)
    _patch(torch.cuda, "set_device", lambda *_: None)
    _patch(torch.cuda, "current_stream", lambda *_: _NullStream())
    _patch(torch.cuda, "stream", lambda *_: nullcontext())
    _patch(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    _patch(torch.nn.Module, "cuda", lambda module, *_: module)
    _patch(torch.Tensor, "type", _type_of(torch.Tensor.type))
    for name in _FACTORIES:
        _patch(torch, name, _on_cpu(getattr(torch, name)), where=_is_for_gpu)
    vars(random).update(
        _CUDA_RNG_STATE_TRACKER=_NullRngTracker(),
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
        _get_cuda_rng_state=lambda *_, **__: None,
        _set_cuda_rng_state=lambda *_, **__: None,
    )
    return True


def _patch(
    owner: object,
    name: str,
    replacement: Callable[..., object],
    *,
    where: Callable[[Mapping[str, object]], bool] = lambda _kwargs: True,
) -> None:
    """Replace `owner.name` for calls from Megatron; any other caller still calls the original.

    where: whether a call with these keywords is replaced.
    """
    original: Callable[..., object] = getattr(owner, name)

    @wraps(original)
    def emulated(*args: object, **kwargs: object) -> object:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not (caller.startswith("megatron.") and where(kwargs)):
            return original(*args, **kwargs)
        queries[f"{getattr(owner, '__name__', '?')}.{name} in {caller}"] += 1
        return replacement(*args, **kwargs)

    setattr(owner, name, emulated)


def _is_for_gpu(kwargs: Mapping[str, object]) -> bool:
    device = kwargs.get("device")
    return (isinstance(device, str) and device.startswith("cuda")) or bool(kwargs.get("pin_memory"))


def _on_cpu(factory: Callable[..., R]) -> Callable[..., R]:
    def make_on_cpu(*args: object, **kwargs: object) -> R:
        kwargs |= {name: value for name, value in _CPU_KWARGS.items() if name in kwargs}
        return factory(*args, **kwargs)

    return make_on_cpu


def _type_of(original: Callable[..., object]) -> Callable[..., object]:
    """`tensor.type()` with the name of a GPU type; conversions are not changed."""

    def emulated(tensor: Tensor, *args: object, **kwargs: object) -> object:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return str(original(tensor)).replace("torch.", "torch.cuda.", 1)

    return emulated
