"""The GPUs that this process may use, and a check of their number."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\d+|(GPU|MIG)-\S+")


def own_gpus(first: int, count: int) -> list[str]:
    """`count` of this process's GPUs, after the first `first` of them, in the form of CUDA_VISIBLE_DEVICES.

    The variable of a server refers to the machine's GPUs, as that of this process does: where it is set, its
    entries are passed on; where it is not, this process may use all GPUs of the machine.

    Raises:
        ConfigError: the variable names fewer.
    """
    if VARIABLE not in os.environ:
        return [str(gpu) for gpu in range(first, first + count)]
    visible = _visible(os.environ[VARIABLE])
    if count and len(visible) < first + count:
        raise ConfigError(
            f"{VARIABLE} = {os.environ[VARIABLE]!r} gives this run {len(visible)} GPUs, and its servers need "
            f"{first + count}; name more there, or lower rollout_num_gpus_per_engine or num_gpus_per_engine."
        )
    return visible[first : first + count]


class Gpu(NamedTuple):
    """A GPU that this process may use. memory: all of it (bytes)."""

    name: str
    memory: int


def present_gpus() -> Sequence[Gpu]:
    """The GPUs that a process started now may use, in their order."""
    import torch

    devices = map(torch.cuda.get_device_properties, range(num_gpus()))
    return tuple(Gpu(device.name, device.total_memory) for device in devices)


def num_gpus() -> int:
    """The number of GPUs that a process started now may use."""
    # Only a process that trains calls this, and it needs torch anyway.
    import torch

    # A rank inherits the environment of now; torch may have cached an earlier device count.
    hidden = VARIABLE in os.environ and not _visible(os.environ[VARIABLE])
    return 0 if hidden else torch.cuda.device_count()


def check_gpus(ranks: int) -> None:
    """Check that each of `ranks` ranks on this machine can have a GPU of its own, if there are any GPUs.

    Raises:
        ConfigError: there are fewer.
    """
    gpus = num_gpus()
    if 0 < gpus < ranks:
        raise ConfigError(
            f"the layout has {ranks} ranks, each with a GPU of its own, and this machine has {gpus}; take "
            f"fewer ranks, or set {VARIABLE}= (to nothing) to train on the CPU."
        )


def _visible(value: str) -> list[str]:
    """The entries as CUDA parses them: those after the first invalid entry are ignored."""
    visible: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _GPU.fullmatch(entry):
            break
        visible.append(entry)
    return visible
