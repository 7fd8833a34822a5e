"""The environment of another process, as the kernel shows it."""

from __future__ import annotations

import time
from pathlib import Path


def environment_of(pid: int) -> list[str]:
    """The variables of a process, each `NAME=value`.

    Whoever starts a process may go on before the kernel has noted where the new program's environment lies;
    until then the file is empty.

    Raises:
        AssertionError: it is empty for 10 s.
    """
    end = time.monotonic() + 10
    while not (content := Path(f"/proc/{pid}/environ").read_bytes()):
        assert time.monotonic() < end, f"process {pid} has no environment"
        time.sleep(0.001)
    return [line.decode(errors="surrogateescape") for line in content.split(b"\0") if line]
