"""What a session may use."""

from __future__ import annotations

from typing import TypedDict


class SessionLimits(TypedDict):
    """Seconds, bytes and counts; the fields of PythonTool say what each means."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    files_bytes: int
    processes: int
    output_bytes: int
    stateful: bool
