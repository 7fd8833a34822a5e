"""Atomic writes of a directory: it appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A temporary folder in the parent of `target`; it replaces `target` when the block ends without error.

    The previous contents stay until then. The next write removes the leftovers of a write that was killed.
    """
    target = target.absolute()
    # Names of earlier versions, too: a write that was killed is recovered by the next one.
    partial, previous = (target.with_name(f".{target.name}.{state}") for state in ("coming", "going"))
    target.parent.mkdir(parents=True, exist_ok=True)
    if previous.exists() and not target.exists():
        # The last write was killed between its two renamings.
        os.replace(previous, target)
    for leftover in (partial, previous):
        shutil.rmtree(leftover, ignore_errors=True)
    is_complete = False
    try:
        yield partial
        is_complete = True
    finally:
        if not is_complete:
            shutil.rmtree(partial, ignore_errors=True)
    if target.exists():
        os.replace(target, previous)
    os.replace(partial, target)
    shutil.rmtree(previous, ignore_errors=True)
