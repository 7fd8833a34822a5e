"""Data of the page as scripts: a browser reads no other file next to a page that was opened from a disk.

    data/episodes-000003.js     agentrl.receive("episodes-000003","eNq1Vm1v...");

The argument is base64 of deflated bytes. So a script holds no character of the data: nothing that a model
wrote can end it or become code.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

SIGNATURE_BITS: Final = 1 << 16
_LEVEL: Final = 1
_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 1 << 16


def write_script(folder: Path, kind: str, number: int, payload: bytes) -> None:
    """Write one script.

    Raises:
        OSError: it cannot be written.
    """
    name = f"{kind}-{number:06d}"
    data = base64.b64encode(zlib.compress(payload, _LEVEL))
    (folder / f"{name}.js").write_bytes(b'agentrl.receive("%b","%b");\n' % (name.encode(), data))


@dataclass(slots=True)
class Shards:
    """Lines of one kind in scripts of about a mebibyte; a longer line has one of its own.

    separator: between lines, and in no line. starts: the first line of each script (count).
    on_script: called with the contents of each.
    """

    folder: Path
    kind: str
    separator: bytes
    on_script: Callable[[bytes], None] = lambda _: None
    starts: list[int] = field(default_factory=list)
    _lines: list[bytes] = field(default_factory=list)
    _num_bytes: int = 0
    _num_lines: int = 0

    def add(self, line: bytes) -> None:
        """Add the next line."""
        if self._lines and self._num_bytes + len(line) > _BYTES:
            self.flush()
        self._lines.append(line)
        self._num_bytes += len(line)
        self._num_lines += 1

    def flush(self) -> None:
        """Write the lines that are in no script yet."""
        if not self._lines:
            return
        payload = self.separator.join(self._lines)
        write_script(self.folder, self.kind, len(self.starts), payload)
        self.on_script(payload)
        self.starts.append(self._num_lines - len(self._lines))
        self._lines, self._num_bytes = [], 0


def batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Lines in lists of 64 kibibytes; a longer line is in one of its own."""
    batch, num_bytes = list[bytes](), 0
    for line in lines:
        if batch and num_bytes + len(line) > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(line)
        num_bytes += len(line)
    if batch:
        yield batch


def signature(text: bytes) -> bytes:
    """The set of three-byte sequences of a text as a Bloom filter with one hash: 65,536 bits, little-endian.

    The page reads only the scripts whose signature has all sequences of a query.
    """
    # Of 16 bits, so that the products are modulo SIGNATURE_BITS as they are.
    codes = np.frombuffer(text, np.uint8).astype(np.uint16)
    hashes = codes[:-2] * np.uint16(7919) + codes[1:-1] * np.uint16(131) + codes[2:]
    bits = np.zeros(SIGNATURE_BITS, bool)
    bits[hashes.astype(np.intp)] = True
    return np.packbits(bits, bitorder="little").tobytes()
