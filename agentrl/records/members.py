"""Files of JSON lines in gzip members: small, readable while they grow and after a crash.

A write is one member. `zcat`, pandas and `read` return every complete member. A member that a crash left
incomplete is skipped, and removed before the next one is written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.errors import RecordError
from agentrl.records import lines
from agentrl.runtime.ownership import open_file
from agentrl.types import JSON

_GZIP: Final = 31
"""zlib's `wbits` for a window of 32 KiB and a gzip header."""
_LEVEL: Final = 1
_BLOCK: Final = 1 << 20
_MAX_BYTES: Final = 1 << 30
"""Of the text of a member: a write is some mebibytes, and one episode more."""


def append(path: Path, lines: Iterable[bytes], *, at: int) -> int:
    """Write lines as one member at byte `at`, replacing all bytes after it; return the member's end.

    Raises:
        OSError: the file cannot be written; it is truncated to `at` bytes.
    """
    compressor = zlib.compressobj(_LEVEL, wbits=_GZIP)
    data = b"".join([*map(compressor.compress, lines), compressor.flush()])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        os.ftruncate(descriptor, at)
        _write(descriptor, data, at)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, at)
        raise
    finally:
        os.close(descriptor)
    return at + len(data)


def end_of_members(path: Path) -> int:
    """The end of the last complete member of a file; 0 where there is no file.

    Raises:
        OSError, RecordError: as for `read`.
    """
    return max((end for end, _ in _members(path)), default=0) if path.exists() else 0


def read(path: Path) -> Iterator[dict[str, JSON]]:
    """The object in every line of every complete member, in order. An incomplete last member is skipped.

    Raises:
        OSError: the file cannot be read.
        RecordError: it, or the folder that holds it, is a link; a member before the last is broken, or
            unpacks to more than a gibibyte; a line holds no object of JSON, with its number.
    """
    number = 0
    for _, text in _members(path):
        for line in text.split(b"\n")[:-1]:
            number += 1
            yield lines.object_of(line, f"{path} line {number}")


def read_lines(path: Path) -> Iterator[bytes]:
    """Every line as it was written, without its newline; see `read`.

    Raises:
        OSError, RecordError: as for `read`, but for lines that hold no object.
    """
    for _, text in _members(path):
        yield from text.split(b"\n")[:-1]


def _write(descriptor: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        num_written = os.pwrite(descriptor, rest, at)
        rest, at = rest[num_written:], at + num_written


def _members(path: Path) -> Iterator[tuple[int, bytes]]:
    """The end and the contents of each complete member."""
    num_read, rest = 0, b""
    with open_file(path, below=path.parent.parent) as file:
        while True:
            member, parts, size = zlib.decompressobj(wbits=_GZIP), list[bytes](), 0
            begin = num_read - len(rest)
            while not member.eof:
                block = rest or file.read(_BLOCK)
                if not block:
                    return
                num_read += 0 if rest else len(block)
                try:
                    parts.append(member.decompress(block, _MAX_BYTES + 1 - size))
                except zlib.error as error:
                    raise RecordError(f"{path} is broken from byte {begin} on: {error}") from None
                size += len(parts[-1])
                if size > _MAX_BYTES:
                    raise RecordError(f"{path} unpacks to more than {_MAX_BYTES:,} bytes at byte {begin}")
                rest = member.unused_data
            yield num_read - len(rest), b"".join(parts)
