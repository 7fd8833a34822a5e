"""Files of text as they are, or unpacked from gzip."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from agentrl.errors import DataError

PACKED = ".gz"
"""The last suffix of a file under gzip."""
_MAX_UNPACKED_BYTES = 64 << 30
_AT_ONCE = 1 << 20


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, from its start; those under gzip are unpacked into a file without a name.

    Raises:
        OSError: it cannot be read.
        DataError: it is damaged, or unpacks to more than 64 GiB.
    """
    if path.suffix.lower() != PACKED:
        return path.open("rb")
    with ExitStack() as stack:
        unpacked = stack.enter_context(tempfile.TemporaryFile(prefix="agentrl-"))
        try:
            with gzip.open(path) as packed:
                _copy(packed, unpacked, path)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} is damaged ({error}); pack it again.") from None
        unpacked.seek(0)
        stack.pop_all()
    return unpacked


def _copy(packed: gzip.GzipFile, unpacked: IO[bytes], path: Path) -> None:
    while text := packed.read(_AT_ONCE):
        unpacked.write(text)
        if unpacked.tell() > _MAX_UNPACKED_BYTES:
            raise DataError(
                f"{path} unpacks to more than {_MAX_UNPACKED_BYTES >> 30} GiB; split it, or unpack it."
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block that reads the file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path.") from error
