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

from agentrl.observe import lines
from agentrl.types import JSON

_GZIP: Final = 31
"""zlib's `wbits` for a window of 32 KiB and a gzip header."""
_LEVEL: Final = 1
_BLOCK: Final = 1 << 20


def append(path: Path, lines: Iterable[bytes], *, at: int) -> int:
    """Write lines as one member at byte `at`, replacing all bytes after it; return the member's end.

    Raises:
        OSError: the file cannot be written; it is truncated to `at` bytes.
    """
    compressor = zlib.compressobj(_LEVEL, wbits=_GZIP)
    data = b"".join([*map(compressor.compress, lines), compressor.flush()])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
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
        ValueError: the file is broken before its last member.
        OSError: the file cannot be read.
    """
    return max((end for end, _ in _members(path)), default=0) if path.exists() else 0


def read(path: Path) -> Iterator[JSON]:
    """Every line of every complete member, in order. An incomplete last member is skipped.

    Raises:
        ValueError: a member before the last is broken, or a line is not JSON, with its number.
    """
    number = 0
    for _, text in _members(path):
        for line in text.split(b"\n")[:-1]:
            number += 1
            try:
                yield lines.from_line(line)
            except ValueError as error:
                raise ValueError(f"{path.name} line {number} is not JSON: {error}") from None


def read_lines(path: Path) -> Iterator[bytes]:
    """Every line as it was written, without its newline; see `read`.

    Raises:
        ValueError: a member before the last is broken.
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
    with path.open("rb") as file:
        while True:
            member, parts = zlib.decompressobj(wbits=_GZIP), list[bytes]()
            begin = num_read - len(rest)
            while not member.eof:
                block = rest or file.read(_BLOCK)
                if not block:
                    return
                num_read += 0 if rest else len(block)
                try:
                    parts.append(member.decompress(block))
                except zlib.error as error:
                    raise ValueError(f"{path.name} is broken from byte {begin} on: {error}") from None
                rest = member.unused_data
            yield num_read - len(rest), b"".join(parts)
