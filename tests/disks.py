"""Disks that are full or read-only, by the kernel's own refusals."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this size: the kernel refuses the write (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_read_only(folder: str) -> None:
    """Mount a folder read-only over itself, in the namespace of `on_small_disk`; open files stay open."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)


def on_small_disk(
    place: Path, kilobytes: int, code: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with a disk of its own of this size at `place`, in namespaces of its own.

    What is on the disk when the process has ended is copied to `place.copy`.
    """
    place.mkdir()
    copy = shlex.quote(str(place) + ".copy")
    python = shlex.join([sys.executable, "-c", code, *arguments])
    script = (
        f"mount -t tmpfs -o size={kilobytes}k small {shlex.quote(str(place))} || exit 99\n"
        f"{python}; code=$?; cp -r {shlex.quote(str(place))} {copy}; exit $code"
    )
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
