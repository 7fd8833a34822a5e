"""Processes that tests for leftover processes ignore."""

from __future__ import annotations

from pathlib import Path


def is_pythons_own(pid: int) -> bool:
    """Whether it is multiprocessing's resource tracker, which lives as long as its parent."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
