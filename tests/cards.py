"""What the driver's program says of GPUs: of those that are there, and of some that are not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

H200_MIB = 143_771


def with_cards(folder: Path, number: int, *, mib: int = H200_MIB, calls: Path | None = None) -> str:
    """A PATH on which `nvidia-smi` lists `number` cards; each call adds a line to the file `calls`."""
    folder.mkdir(exist_ok=True)
    rows = "\n".join(f"{n}, {uuid_of(n)}, NVIDIA H200, {mib}" for n in range(number))
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> {calls or '/dev/null'}\ncat <<'END'\n{rows}\nEND\n")
    program.chmod(0o755)
    return os.pathsep.join((str(folder), os.environ["PATH"]))


def uuid_of(number: int) -> str:
    """The UUID of a card."""
    return f"GPU-{number:08x}-d72c-4106-c12f-20bd9faed9f6"


def free_memory() -> int:
    """The free memory of the first card that is there (bytes), without the help of CUDA."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(listed.split()[0]) << 20
