"""Processes that are nobody's business."""

from __future__ import annotations

from pathlib import Path


def is_pythons_own(pid: int) -> bool:
    """Whether it is multiprocessing's tracker of resources, which stays as long as who needed it."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
