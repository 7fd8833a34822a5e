"""Files that are written whole or not at all, disks that take no more, and files that are not there yet."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from agentrl.errors import DiskError, UserError

_FULL_OR_READ_ONLY: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
_POINTER: Final = re.compile(rb"version \S+\n(?:[a-z0-9.-]+ .+\n)*oid sha256:[0-9a-f]{64}\nsize (\d+)\n?")
_LONGEST_POINTER: Final = 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OF_THE_SYSTEM: Final = re.compile(r"\(os error (\d+)\)")
_COMPILERS: Final = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
}


def write_text(path: Path, text: str, *, errors: Literal["strict", "replace"] = "strict") -> None:
    """Write a file, whole or not at all: until it is complete, the path holds what it held before.

    errors: for halves of surrogate pairs, which the text of a model may have and UTF-8 has not.

    Raises:
        OSError: the disk does not take it.
        UnicodeEncodeError: the text holds half of a surrogate pair, and errors is "strict".
    """
    write_bytes(path, text.encode("utf-8", errors))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, as `write_text`.

    Raises:
        OSError: the disk does not take it.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        # No link that was put there is followed.
        part.unlink(missing_ok=True)
        with part.open("xb") as file:
            file.write(data)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors(folder: Path, remedy: str) -> Iterator[None]:
    """Convert an OSError of the block, by which a disk refuses a write, to a DiskError.

    Any other OSError, such as that of a connection, passes through. A missing permission is one of the disk
    where it is that of a file below `folder`.

    Args:
        folder: is named where the error names no file.
        remedy: the end of the sentence, without its full stop.
    """
    try:
        yield
    except OSError as error:
        if not is_refused_write(error, folder):
            raise
        place = error.filename or folder
        raise DiskError(f"{place} cannot be written ({error.strerror}); {remedy}.") from error


def is_refused_write(error: OSError, folder: Path | None = None) -> bool:
    """Whether a disk is full, over its quota or read-only; or `folder` is not to be written."""
    if error.errno in _FULL_OR_READ_ONLY:
        return True
    is_below = folder is not None and str(error.filename).startswith(str(folder))
    return error.errno in _FORBIDDEN and is_below


class SystemErrors:
    """Convert what safetensors and tokenizers make of a write that the system refuses to its OSError.

    They are written in Rust, and put the number of the error into a text. place: what is written.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = None if isinstance(error, OSError) else _OF_THE_SYSTEM.search(str(error))
        if isinstance(error, Exception) and found is not None:
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(self._place)) from error


def check_fetched(paths: Iterable[Path], kind: type[UserError]) -> None:
    """Check that no file is what Git LFS writes in place of a large one that it has not fetched.

    paths: of files, which may be missing. kind: of the error.

    Raises:
        UserError: one is such a pointer.
    """
    for path in paths:
        with suppress(OSError), path.open("rb") as file:
            if pointer := _POINTER.fullmatch(file.read(_LONGEST_POINTER + 1)):
                raise kind(
                    f"{path} is a pointer of Git LFS, and not the file of {int(pointer[1]):,} bytes that it "
                    f"stands for; fetch that with `git lfs pull` in its repository."
                )


def private_cache(name: str) -> Path | None:
    """A folder for files that later runs of this user read again: `agentrl/NAME` in XDG_CACHE_HOME.

    Returns:
        See `private_folder`.
    """
    return private_folder("XDG_CACHE_HOME", ".cache", name)


def private_folder(variable: str, default: str, name: str) -> Path | None:
    """The folder `agentrl/NAME` where a variable says; nobody else can write to it, or read it.

    default: below the home folder, where the variable is not set.

    Returns:
        The folder; None where there is no such folder of this user's own, so that nothing is kept.
    """
    base = os.environ.get(variable, "")
    try:
        home = Path(base) if os.path.isabs(base) else Path.home() / default
        folder = home / "agentrl" / name
        home.mkdir(parents=True, exist_ok=True)
        # What is kept there is believed: a folder that somebody else has made first is not used.
        for path in (folder.parent, folder):
            path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            facts = path.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                return None
            if facts.st_mode & _OTHERS:
                path.chmod(stat.S_IRWXU)
    # No home, a home that cannot be written, or a path that is a file.
    except (OSError, RuntimeError):
        return None
    return folder


def compiler_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which compilers of kernels keep their results from one run to the next.

    environment: of the process that compiles; what it sets is left out.
    """
    folders = {
        variable: private_cache(name) for variable, name in _COMPILERS.items() if variable not in environment
    }
    return {variable: str(folder) for variable, folder in folders.items() if folder is not None}
