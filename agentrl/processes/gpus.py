"""The GPUs that this process may hand out, and a check of their number. None of it initialises CUDA."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from agentrl.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = {VARIABLE: ""}
"""The variables of a process that computes on the CPU: nothing in it can touch a card."""
_GPU = re.compile(r"\d+|(GPU|MIG)-\S+")
_PROGRAM = "nvidia-smi"
_QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_UNKNOWN = "GPU"
_QUERY_S, _NUM_FIELDS = 60.0, 4


_PEAKS = {
    "H200 NVL": 835,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "L40S": 362,
    "A100": 312,
    "A40": 149.7,
    "A10": 125,
}
"""bfloat16 without sparsity, by NVIDIA's data sheets (TFLOP/s); names are looked for in this order."""


def bf16_peak(name: str) -> float | None:
    """What a GPU multiplies at most in bfloat16, by its data sheet (FLOP/s); None = it is not known here.

    name: as the driver and torch have it, such as `NVIDIA H100 80GB HBM3`.
    """
    words = f" {name} ".replace("-", " ")
    if " MIG " in words:
        return None
    peaks = (peak for known, peak in _PEAKS.items() if all(f" {word} " in words for word in known.split()))
    return next((peak * 1e12 for peak in peaks), None)


class Gpu(NamedTuple):
    """A GPU that this process may use.

    id: as CUDA_VISIBLE_DEVICES names it. memory: all of it (bytes); 0 = unknown.
    """

    id: str
    name: str
    memory: int


def own_gpus() -> list[str]:
    """The GPUs of this process, in their order, in the form of CUDA_VISIBLE_DEVICES.

    The variable of a process refers to the machine's GPUs: where it is set here, its entries are passed on;
    where it is not, this process may use all GPUs of the machine.
    """
    if VARIABLE in os.environ:
        return _visible(os.environ[VARIABLE])
    return [gpu.id for gpu in present_gpus()]


def present_gpus() -> Sequence[Gpu]:
    """The GPUs that a process started now may use, in their order; those that are really there.

    torch is not asked for them: it would initialise CUDA, which takes memory of a card that others have.
    """
    installed = _installed(os.environ.get("PATH"))
    if VARIABLE not in os.environ:
        known = [Gpu(gpu.number, gpu.name, gpu.memory) for gpu in installed]
        return known or [Gpu(str(number), _UNKNOWN, 0) for number in range(num_gpus())]
    visible = _visible(os.environ[VARIABLE])
    if not installed:
        return [Gpu(entry, _UNKNOWN, 0) for entry in visible[: num_gpus()]]
    return [
        Gpu(entry, gpu.name, gpu.memory) for entry in visible for gpu in installed if gpu.is_meant_by(entry)
    ] + [Gpu(entry, "part of a GPU", 0) for entry in visible if entry.startswith("MIG")]


def num_gpus() -> int:
    """The number of GPUs that a process of torch started now may use; 0 where torch is built without CUDA."""
    if find_spec("torch") is None:
        return 0
    # Only where something is trained, which needs torch anyway. It counts by NVML, without CUDA.
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


def variables_of(gpus: Sequence[str]) -> dict[str, str]:
    """The variables of a process that has these GPUs alone; of one that gets none, nothing is said."""
    return {VARIABLE: ",".join(gpus)} if gpus else {}


def in_words() -> str:
    """What gives this process its GPUs, and how many, for the beginning of a sentence."""
    gpus = len(own_gpus())
    number = f"{gpus or 'no'} GPU{'' if gpus == 1 else 's'}"
    if VARIABLE in os.environ:
        return f"{VARIABLE} = {os.environ[VARIABLE]!r} gives this run {number}"
    return f"this machine has {number}"


def _visible(value: str) -> list[str]:
    """The entries as CUDA parses them: those after the first invalid entry are ignored."""
    visible: list[str] = []
    for entry in map(str.strip, value.split(",")):
        if not _GPU.fullmatch(entry):
            break
        visible.append(entry)
    return visible


class _Installed(NamedTuple):
    """A GPU of this machine: its number and its UUID, its name and its memory (bytes)."""

    number: str
    uuid: str
    name: str
    memory: int

    def is_meant_by(self, entry: str) -> bool:
        """Whether an entry of CUDA_VISIBLE_DEVICES names it, by number or by the beginning of its UUID."""
        return entry == self.number or (not entry.isdigit() and self.uuid.startswith(entry))


@cache
def _installed(path: str | None) -> Sequence[_Installed]:
    """The GPUs of this machine, as their driver lists them; () where it cannot be asked.

    path: where its program is looked for. The machine keeps its GPUs, so it is asked once.
    """
    if (program := shutil.which(_PROGRAM, path=path)) is None:
        return ()
    try:
        command = [program, *_QUERY]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines()]
    return tuple(
        _Installed(number, uuid, name, int(mebibytes) << 20 if mebibytes.isdigit() else 0)
        for number, uuid, name, mebibytes in (row for row in rows if len(row) == _NUM_FIELDS)
    )
