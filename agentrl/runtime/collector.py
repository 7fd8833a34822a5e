"""This process's memory: how often Python looks for circles of objects, and what goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_THRESHOLDS: Final = (50_000, 100, 100)
_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's collector run less often, and leave alone what lives already.

    Thousands of episodes under way are millions of objects that live long. With Python's own thresholds (700,
    10, 10) all of them are visited again and again: a turn of 10,000 episodes takes more CPU time than one of
    128. Few objects of an episode refer to each other in a circle, so little memory waits for a collection:
    what 50,000 new objects hold. Imported modules live as long as the process.

    Blocks in several threads may overlap: the last to end restores Python's own thresholds.
    """
    with _lock:
        _before.append(gc.get_threshold())
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        with _lock:
            # The first block found the thresholds of before.
            last = _before.pop()
            if not _before:
                gc.set_threshold(*last)
                gc.unfreeze()


def resident_bytes() -> int:
    """The memory of this process that is in RAM now, mapped files included (bytes); 0 where /proc is not."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def freed_bytes(free: Callable[[], None]) -> int:
    """Call `free`, and return how much memory the system got back by it (bytes).

    A C library keeps freed memory for later allocations. glibc's is returned here, too.
    """
    before = resident_bytes()
    free()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return max(0, before - resident_bytes())
