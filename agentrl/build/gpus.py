"""Which GPUs are this process's own, by the names that its servers are told."""

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


def _visible(value: str) -> list[str]:
    """As CUDA reads it: what comes after the first entry that is no GPU does not count."""
    visible: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _GPU.fullmatch(entry):
            break
        visible.append(entry)
    return visible
