"""A model directory appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it takes its place when the block has ended well.

    What was there before is kept until then; the next write clears what one left that was killed.
    """
    target = target.absolute()
    coming, going = (target.with_name(f".{target.name}.{state}") for state in ("coming", "going"))
    target.parent.mkdir(parents=True, exist_ok=True)
    if going.exists() and not target.exists():
        # The last write was killed between its two renamings.
        os.replace(going, target)
    for leftover in (coming, going):
        shutil.rmtree(leftover, ignore_errors=True)
    written = False
    try:
        yield coming
        written = True
    finally:
        if not written:
            shutil.rmtree(coming, ignore_errors=True)
    if target.exists():
        os.replace(target, going)
    os.replace(coming, target)
    shutil.rmtree(going, ignore_errors=True)
