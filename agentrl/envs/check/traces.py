"""The resources that an episode may leak in this process: threads, child processes, files, sockets, tasks.

Read from /proc where there is one; threads, tasks and temporary files are listed on every platform.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures.thread import _worker
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from agentrl.runtime.temporary import temporary_folder

_SETTLE_S = 1.0
_POLL_S = 0.02
_MAX_POLLS = int(_SETTLE_S / _POLL_S)
_NUMBER = re.compile(r"[-_]\d+")


class Trace(NamedTuple):
    """One open resource: its kind (thread, process, file, socket, task), and its name."""

    kind: str
    name: str


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder for `tempfile` and child processes, so that files of other programs are not counted."""
    with temporary_folder("check") as folder:
        before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable


def present(folder: Path) -> Counter[Trace]:
    """All open resources; `folder`: that of temporary files."""
    # Without the numbers in their names, since a shared resource may be opened again.
    traces = Counter(Trace("thread", _NUMBER.sub("", thread.name)) for thread in _threads())
    traces.update(Trace("process", _command(pid)) for pid in _children())
    traces.update(_descriptors())
    traces.update(Trace("file", path.name) for path in folder.rglob("*"))
    traces.update(Trace("task", task.get_name()) for task in asyncio.all_tasks())
    return traces


async def leftovers(before: Counter[Trace], folder: Path) -> list[Trace]:
    """The open resources that `before` lacks, after a second to close."""
    for poll in range(_MAX_POLLS):
        if not (present(folder) - before):
            return []
        if poll == 1:
            gc.collect()
        await asyncio.sleep(_POLL_S if poll else 0)
    return sorted(present(folder) - before)


def _threads() -> Iterator[threading.Thread]:
    """All threads, without the idle ones of `asyncio.to_thread`: these stay until the event loop ends."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        idle = frame is not None and frame.f_code is _worker.__code__
        if not (idle and thread.name.startswith("asyncio_")):
            yield thread


def _children() -> Iterator[str]:
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread may end during the listing.
        with suppress(OSError):
            yield from path.read_text().split()


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip()
    except OSError:
        return pid


def _descriptors() -> Iterator[Trace]:
    for path in Path("/proc/self/fd").glob("*"):
        # The descriptor of this very listing is closed by now.
        with suppress(OSError):
            target = os.readlink(path)
            # Without the numbers of sockets, pipes, processes or threads: a shared resource may reopen one.
            kind, _, number = target.partition(":")
            name = kind if number.startswith("[") else target
            yield Trace("socket" if name == "socket" else "file", name)
