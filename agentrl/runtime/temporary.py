"""Temporary folders and files that do not outlive the process which made them.

They are removed at the end of their block, and those of a process that was killed by the next one of the same
user that makes some: so a killed run leaves its own until then, and no longer.

    /tmp/agentrl-check-k2_8x1qa/              mode 0700
    /tmp/agentrl-check-k2_8x1qa/.agentrl      locked while their process lives

The kernel releases a lock when the process has ended, however it ends; a number of a process might be that of
another one by now. What other users put there under such a name is neither opened nor removed: no link is
followed, and no pipe is waited for.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "agentrl-"
"""How the names of all folders begin."""
LOCK: Final = ".agentrl"
"""The file in a folder whose lock its process has. Its text is the name of what keeps the folder."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME_BYTES: Final = 255


@contextmanager
def temporary_folder(name: str, *, base: Path | None = None, kept_with: str = "") -> Iterator[Path]:
    """A new folder of this user alone, for the block; older ones of processes that were killed are removed.

    Args:
        name: its path ends with `agentrl-NAME-` and eight characters.
        base: where it is made; None = in the folder for temporary files.
        kept_with: a file or folder in it: where the block is broken off, or the process is killed, a folder
            that holds it stays.

    Raises:
        OSError: it cannot be made.
    """
    base = Path(tempfile.gettempdir()) if base is None else base
    sweep(base, PREFIX)
    path, lock = _locked_folder(base, f"{PREFIX}{name}-")
    is_whole = False
    try:
        if lock is not None:
            os.write(lock, kept_with.encode())
        yield path
        is_whole = True
    finally:
        if not is_whole and kept_with and (path / kept_with).exists():
            (path / LOCK).unlink(missing_ok=True)
        else:
            _remove(path)
        if lock is not None:
            os.close(lock)


@contextmanager
def temporary_file(prefix: str, folder: Path) -> Iterator[Path]:
    """A new, empty file that only this user may open, for the block.

    `sweep` removes those of processes that were killed.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        path = Path(name)
        if _is_locked(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(folder: Path, prefix: str, *, unwritten_s: float = 0.0) -> list[Path]:
    """Remove the temporary folders and files of this user's processes that were killed.

    Args:
        prefix: of their names.
        unwritten_s: a file that was written since then stays (seconds).

    Returns:
        The folders of such processes that stay for what they hold.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(prefix)]
        # Where others may rename what is not theirs, a name proves nothing.
        if paths and _is_safe(folder):
            return [path for path in paths if _stays(path, unwritten_s)]
    return []


def _stays(path: Path, unwritten_s: float) -> bool:
    """Remove what a killed process left at a path; true where it stays for what it holds."""
    with suppress(OSError):
        facts = path.lstat()
        is_folder = stat.S_ISDIR(facts.st_mode)
        if not _is_own(facts) or (is_folder and facts.st_mode & _OTHERS):
            return False
        descriptor = os.open(path / LOCK if is_folder else path, _READ)
        try:
            lock = os.fstat(descriptor)
            if not _is_own(lock) or time.time() - lock.st_mtime < unwritten_s:
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = os.read(descriptor, _NAME_BYTES).decode("utf-8", "replace") if is_folder else ""
            if name and (path / name).exists():
                return True
            _remove(path)
        finally:
            os.close(descriptor)
    return False


def _is_own(facts: os.stat_result) -> bool:
    """Whether it is a folder or a file with bytes, and this user's."""
    is_plain = stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)
    return is_plain and facts.st_uid == os.geteuid()


def _locked_folder(base: Path, prefix: str) -> tuple[Path, int | None]:
    """A new folder, and the descriptor of its lock; None = its file system makes nothing this user's own."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        if not stat.S_ISDIR((facts := path.lstat()).st_mode) or not _is_own(facts):
            return path, None
        descriptor = os.open(path / LOCK, _NEW, 0o600)
        if _is_locked(descriptor, path / LOCK):
            return path, descriptor
        os.close(descriptor)


def _is_locked(descriptor: int, path: Path) -> bool:
    """Lock a new file; false where a `sweep` was faster, which has removed it."""
    # Without locks on this file system, no sweep gets one, either.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    with suppress(OSError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
            return
        shutil.rmtree(path, ignore_errors=True)
        # What is left is below folders that their own user must not write, as code may make them.
        for folder, names, _ in os.walk(path):
            for child in (Path(folder, name) for name in names):
                if not child.is_symlink():
                    child.chmod(stat.S_IRWXU)
        shutil.rmtree(path, ignore_errors=True)


def _is_safe(folder: Path) -> bool:
    mode = folder.stat().st_mode
    return not mode & _OTHERS_WRITE or bool(mode & stat.S_ISVTX)
