"""Megatron-Core on a machine without CUDA: the one place where CUDA is emulated on the CPU.

Megatron writes `device="cuda"`, `.cuda()` and `torch.cuda.current_device()` into its code. Where CUDA is
absent, `emulate_cuda()` has those calls answered with the CPU, for Megatron alone: others who call the same
functions of torch get torch's own answer. Every place that needed an answer is in `queries`.

What a run on the CPU shows: mathematics, sharding, control flow, files. What it does not show: streams and
their order, overlap of communication and computation, NCCL, fused kernels, pinned memory, GPU memory.
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
_HERE: dict[str, object] = {"device": _CPU, "pin_memory": False}
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")

R = TypeVar("R")

queries: Counter[str] = Counter()
"""What was answered for whom, and how often: {"torch.cuda.current_device in megatron.core.utils": 3}."""


def here() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


class _Nothing:
    """A stream or an event of a machine that does one thing after the other."""

    def wait_stream(self, other: object) -> None:
        """All that was queries before is done."""

    def record(self, stream: object = None) -> None:
        """Nothing to remember."""

    def wait(self, stream: object = None) -> None:
        """It has happened."""

    def synchronize(self) -> None:
        """It has happened."""


class _NoLuck:
    """Megatron's tracker of random states, where nothing is random: weights are loaded, dropout is off."""

    def fork(self, _name: str = "") -> nullcontext[None]:
        """Nothing to keep apart."""
        return nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def set_states(self, _states: dict[str, Tensor]) -> None:
        """Nothing to restore."""


def emulate_cuda() -> bool:
    """Answer Megatron's questions for a GPU with the CPU; False where there is CUDA, and nothing is done."""
    if torch.cuda.is_available():
        return False
    if queries["emulating"]:
        return True
    queries["emulating"] = 1
    _answer(torch.cuda, "current_device", lambda: _CPU)
    _answer(torch.cuda, "synchronize", lambda *_: None)
    _answer(torch.cuda, "set_device", lambda *_: None)
    _answer(torch.cuda, "current_stream", lambda *_: _Nothing())
    _answer(torch.cuda, "stream", lambda *_: nullcontext())
    _answer(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    _answer(torch.nn.Module, "cuda", lambda module, *_: module)
    _answer(torch.Tensor, "type", _type_of(torch.Tensor.type))
    for name in _FACTORIES:
        _answer(torch, name, _on_the_cpu(getattr(torch, name)), where=_wants_a_gpu)
    vars(random).update(
        _CUDA_RNG_STATE_TRACKER=_NoLuck(),
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
        _get_cuda_rng_state=lambda *_, **__: None,
        _set_cuda_rng_state=lambda *_, **__: None,
    )
    return True


def _answer(
    owner: object,
    name: str,
    answer: Callable[..., object],
    *,
    where: Callable[[Mapping[str, object]], bool] = lambda _kwargs: True,
) -> None:
    """Let `owner.name` be `answer` for Megatron, and what it was for everyone else.

    where: whether a call with these keywords needs the answer.
    """
    original: Callable[..., object] = getattr(owner, name)

    @wraps(original)
    def emulated(*args: object, **kwargs: object) -> object:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not (caller.startswith("megatron.") and where(kwargs)):
            return original(*args, **kwargs)
        queries[f"{getattr(owner, '__name__', '?')}.{name} in {caller}"] += 1
        return answer(*args, **kwargs)

    setattr(owner, name, emulated)


def _wants_a_gpu(kwargs: Mapping[str, object]) -> bool:
    device = kwargs.get("device")
    return (isinstance(device, str) and device.startswith("cuda")) or bool(kwargs.get("pin_memory"))


def _on_the_cpu(make: Callable[..., R]) -> Callable[..., R]:
    def made(*args: object, **kwargs: object) -> R:
        kwargs |= {name: answer for name, answer in _HERE.items() if name in kwargs}
        return make(*args, **kwargs)

    return made


def _type_of(original: Callable[..., object]) -> Callable[..., object]:
    """`tensor.type()` as a GPU would say it; conversions are left alone."""

    def emulated(tensor: Tensor, *args: object, **kwargs: object) -> object:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return str(original(tensor)).replace("torch.", "torch.cuda.", 1)

    return emulated
