"""The files of a Ray of this run's own, where no other user reaches them.

Ray opens its folder, and most of what is in it, to all users (mode 0777). So that folder is inside another
one, which only this user can enter.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.runtime.temporary import PREFIX, temporary_folder

_NAME = "ray"
FOLDERS = f"{PREFIX}{_NAME}-"
"""How the names of the folders with the files of such a Ray begin."""
_RANDOM = 8
_INSIDE = "r"
_IN_SESSION = "session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
# The path of a socket has 107 bytes at most.
_MOST_BYTES = 107 - len(f"/{FOLDERS}/{_INSIDE}/{_IN_SESSION}") - _RANDOM
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def private_folder() -> Iterator[Path]:
    """A path for the folder of Ray, for the block: nothing is there yet, and no other user can reach it.

    Raises:
        ConfigError: the folder for temporary files has too long a path, or others can replace what is in it.
    """
    base = Path(tempfile.gettempdir()).resolve()
    _check_base(base)
    with temporary_folder(_NAME, base=base) as outer:
        facts = outer.lstat()
        # Some file systems give all files the modes and owners with which they were mounted.
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS:
            raise ConfigError(
                f"no folder below {base} can be this user's alone, as the files of Ray have to be; set "
                "TMPDIR to another folder."
            )
        yield outer / _INSIDE


def link(logs: Path, ray: Path) -> None:
    """Have `logs` lead to those of the last session in the folder of Ray."""
    if targets := sorted(ray.glob("session_2*/logs")):
        logs.symlink_to(targets[-1])


def keep_logs(logs: Path) -> None:
    """Replace the link by what it leads to."""
    if logs.is_symlink():
        target = logs.resolve()
        remove(logs)
        if target.is_dir():
            # Modes are copied, too; those of Ray would open the copy to all users.
            target.chmod(stat.S_IRWXU)
            shutil.copytree(target, logs, symlinks=True, ignore_dangling_symlinks=True)


def _check_base(base: Path) -> None:
    if len(os.fsencode(base)) > _MOST_BYTES:
        raise ConfigError(
            f"{base}, the folder for temporary files, has too long a path for the sockets of Ray (at most "
            f"{_MOST_BYTES} bytes); set TMPDIR to a shorter one."
        )
    for path in (base, *base.parents):
        mode = path.stat().st_mode
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"other users could replace the files of Ray, which would be below {path}: they can write "
                f"there, and it has no sticky bit; run chmod +t {path}, or set TMPDIR to another folder."
            )


def remove(path: Path) -> None:
    """Remove logs of an earlier run: a folder, or a link, and nothing of what it leads to."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
