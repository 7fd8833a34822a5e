"""The memory of this machine's GPUs, and the processes that hold it, as the driver (NVML) counts it.

`nvidia-smi` is asked, in a process of its own: no process of a run touches a GPU that it does not compute on.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TIMEOUT_S = 10.0
_MIB = 2**20
_HOSTED = "agentrl.processes.hosted"
_IS_FULL = re.compile(
    r"out of memory|OutOfMemoryError|leave no GPU memory|Not enough memory|CUBLAS_STATUS_ALLOC_FAILED"
)


class Holder(NamedTuple):
    """A process with memory of a GPU. gpu: its index on this machine. name: such as `rank 0`. held: bytes."""

    gpu: int
    pid: int
    name: str
    held: int


def holders() -> Sequence[Holder]:
    """The processes that hold memory of this machine's GPUs, on each the largest first."""
    gpus = {uuid: number for number, (uuid,) in enumerate(_asked("--query-gpu=uuid"))}
    found = [
        Holder(gpus[uuid], int(pid), _name_of(int(pid), name), int(size) * _MIB)
        for uuid, pid, name, size in _asked("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
        if uuid in gpus and pid.isdigit() and size.isdigit()
    ]
    return sorted(found, key=lambda holder: (holder.gpu, -holder.held))


def is_out_of_memory(text: str) -> bool:
    """Whether an error, or the lines of a log, say that a GPU has no memory left."""
    return _IS_FULL.search(text) is not None


def held_text() -> str:
    """Who holds what on each GPU, for a sentence: `GPU 0: rank 0 (process 12) 31.5 GiB`; "" = unknown."""
    texts: dict[int, list[str]] = {}
    for gpu, pid, name, held in holders():
        texts.setdefault(gpu, []).append(f"{name} (process {pid}) {held / 2**30:.1f} GiB")
    return "; ".join(f"GPU {gpu}: {', '.join(parts)}" for gpu, parts in texts.items())


def _asked(query: str) -> list[list[str]]:
    """The rows of a query; none where there is no driver."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


def _name_of(pid: int, name: str) -> str:
    """What a process is in a run; the name that the driver gives where that is not known."""
    words: list[str] = []
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    if _HOSTED in words:
        # python -m MODULE FD NAME
        return words[words.index(_HOSTED) + 2].replace("-", " ")
    if any("sglang" in word for word in words):
        return "a server"
    return name.rpartition("/")[2] or "a process"
