"""Which GPUs of this machine belong to this process, and whether they suffice."""

from __future__ import annotations

import os
import re

from agentrl.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\d+|(GPU|MIG)-\S+")


def own_gpus(first: int, count: int) -> list[str]:
    """`count` of this process's GPUs, after the first `first` of them, as CUDA_VISIBLE_DEVICES names them.

    A server that is given the variable counts in the machine's GPUs, as this process's own does: where it is
    set, its entries are passed on; where it is not, all GPUs of the machine are ours.

    Raises:
        ConfigError: it names fewer.
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


def check_gpus(ranks: int) -> None:
    """See that so many ranks of this machine can have a GPU each, if there are any GPUs.

    Raises:
        ConfigError: there are fewer.
    """
    # Whoever asks trains, and has torch.
    import torch

    # A rank sees what the environment shows now; torch may remember what it showed before.
    hidden = VARIABLE in os.environ and not _visible(os.environ[VARIABLE])
    gpus = 0 if hidden else torch.cuda.device_count()
    if 0 < gpus < ranks:
        raise ConfigError(
            f"the layout has {ranks} ranks, each with a GPU of its own, and this machine has {gpus}; take "
            f"fewer ranks, or set {VARIABLE}= (to nothing) to train on the CPU."
        )


def _visible(value: str) -> list[str]:
    """As CUDA reads it: what comes after the first entry that is no GPU does not count."""
    visible: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _GPU.fullmatch(entry):
            break
        visible.append(entry)
    return visible
