"""What tensor code asks of a GPU: copies that nothing waits for, and functions that become one kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from subprocess import SubprocessError
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Number = TypeVar("Number", bound=np.generic)

_log = logging.getLogger(__name__)


def to_device(array: npt.NDArray[Number], device: torch.device | str) -> Tensor:
    """The array as a tensor on the device; on the CPU it shares the array's memory.

    A copy to a GPU begins, and this returns: a copy out of memory that is not pinned would wait until the
    GPU has computed all that it was asked for before.
    """
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which on a GPU runs as one kernel, or a few, instead of one for each operation.

    Each would read and write all of its operands, and be launched by itself. The first argument is a tensor
    [T, ...]; T may change from call to call without a new compilation. Where nothing can be compiled
    (`compiles`), and on the CPU, the function runs as it is.
    """
    # Importing the compiler takes a second.
    compiled = lru_cache(maxsize=1)(lambda: torch.compile(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor), "the first argument is a tensor"
        if first.device.type == "cpu" or not compiles(first.device):
            return function(*args, **kwargs)
        mark_tokens(args)
        return compiled()(*args, **kwargs)

    return call


def mark_tokens(args: Sequence[object]) -> None:
    """Let the compiler know that all tensors as long as the first one may have another length next time."""
    tensors = [argument for argument in args if isinstance(argument, Tensor) and argument.ndim]
    for tensor in tensors:
        if len(tensor) == len(tensors[0]):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


@lru_cache(maxsize=8)
def compiles(device: torch.device) -> bool:
    """Whether torch can compile kernels for a GPU here: it needs Triton and a C compiler."""
    try:
        torch.compile(lambda x: (x * 2).sum())(torch.ones(64, device=device))
    # A missing Triton or C compiler shows as any of these.
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning("kernels: one for each operation, since torch cannot compile here: %s", reason[0])
        return False
    return True
