"""What an episode may leave behind in this process: threads, child processes, open files, sockets, tasks.

Read from /proc where there is one; threads, tasks and temporary files are seen everywhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_SETTLE_S = 1.0
_LOOK_AGAIN_S = 0.02
_MOST_LOOKS = int(_SETTLE_S / _LOOK_AGAIN_S)


class Trace(NamedTuple):
    """One thing that is still there: its kind (thread, process, file, socket, task), and its name."""

    kind: str
    name: str


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder that `tempfile` and child processes use meanwhile, so that others' files are not ours."""
    with tempfile.TemporaryDirectory(prefix="agentrl-check-") as folder:
        before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def present(folder: Path) -> Counter[Trace]:
    """Everything there is now; `folder`: where temporary files would be."""
    found = Counter(Trace("thread", one.name) for one in threading.enumerate())
    found.update(Trace("process", _command(pid)) for pid in _children())
    found.update(_descriptors())
    found.update(Trace("file", path.name) for path in folder.rglob("*"))
    found.update(Trace("task", one.get_name()) for one in asyncio.all_tasks())
    return found


async def left_behind(before: Counter[Trace], folder: Path) -> list[Trace]:
    """What is there that was not before, after it has had a second to go."""
    for look in range(_MOST_LOOKS):
        if not (present(folder) - before):
            return []
        if look == 1:
            gc.collect()
        await asyncio.sleep(_LOOK_AGAIN_S if look else 0)
    return sorted(present(folder) - before)


def _children() -> Iterator[str]:
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread may end while it is looked at.
        with suppress(OSError):
            yield from path.read_text().split()


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return pid


def _descriptors() -> Iterator[Trace]:
    for path in Path("/proc/self/fd").glob("*"):
        # The descriptor of this very listing is closed by now.
        with suppress(OSError):
            target = os.readlink(path)
            # No numbers of sockets, pipes, processes or threads: what is shared may replace one by another.
            kind, _, number = target.partition(":")
            name = kind if number.startswith("[") else target
            yield Trace("socket" if name == "socket" else "file", name)
