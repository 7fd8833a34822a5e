"""JSON lines, and lists of JSON objects; under gzip, too.

A file of lines is read once when it is opened, to index the offset of every 32nd row and, in another thread,
to hash all bytes. A row is then read from its block of lines.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from os import fstat, stat_result
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from agentrl.data.rows.base import Row, Rows
from agentrl.data.rows.packed import opened, reading
from agentrl.errors import DataError
from agentrl.types import JSON

_BLOCK = 32
_READ_AT_ONCE = 1 << 18
_MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])


class JsonlRows(Rows):
    """A file with one JSON object a line of at most 64 MiB; blank lines are no rows.

    Raises:
        DataError: the file cannot be read, or a line is too long.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The offset of each block of rows, and the number of its first line.
        self._starts, self._lines = array("q"), array("q")
        self._count = 0
        with reading(path):
            self._file = opened(path)
            self.fingerprint = self._index()
        self._state = _state(fstat(self._file.fileno()))
        self._block = lru_cache(maxsize=8)(self._read_block)

    def _index(self) -> str:
        """Find the rows of all blocks; returns the hash, which another thread computes meanwhile.

        Of a line, whatever its length, only the start is held.
        """
        digest = hashlib.blake2b(digest_size=16)
        # Of the line that goes on: its offset, its number, and whether it is a row as far as it was read.
        start, number, is_row, end = 0, 1, False, 0
        with ThreadPoolExecutor(1, "agentrl-data") as thread:
            while text := self._file.read(_READ_AT_ONCE):
                hashed = thread.submit(digest.update, text)
                offsets, are_rows = _parts_of(text)
                starts = end + offsets
                starts[0], are_rows[0] = start, is_row or are_rows[0]
                self._add_lines(starts[:-1], are_rows[:-1], number)
                start, is_row, end = int(starts[-1]), bool(are_rows[-1]), end + len(text)
                lengths = np.diff(np.append(starts, end + 1)) - 1
                self._check(int(lengths.max()), number + int(lengths.argmax()))
                number += len(starts) - 1
                hashed.result()
        self._add_lines(np.array([start]), np.array([is_row]), number)
        self._starts.append(end)
        return digest.hexdigest()

    def _add_lines(self, starts: npt.NDArray[np.intp], are_rows: npt.NDArray[np.bool_], number: int) -> None:
        """Add complete lines, of which the first has this number."""
        rows = np.flatnonzero(are_rows)
        firsts = rows[-self._count % _BLOCK :: _BLOCK]
        self._starts.extend(starts[firsts].tolist())
        self._lines.extend((number + firsts).tolist())
        self._count += len(rows)

    def _check(self, length: int, number: int) -> None:
        if length > _MAX_LINE_BYTES:
            raise DataError(
                f"{self._path}, line {number} is longer than {_MAX_LINE_BYTES:,} bytes; write each row on a "
                "line of its own, and shorten rows that are longer."
            )

    def __len__(self) -> int:
        return self._count

    def row(self, number: int) -> Row:
        """The row with a number."""
        block, offset = divmod(number, _BLOCK)
        _, line = self._block(block)[offset]
        return read_object(line.removeprefix(_BOM) if number == 0 else line, self.where(number))

    def where(self, number: int) -> str:
        """The file and the number of the line, from 1 on."""
        block, offset = divmod(number, _BLOCK)
        return f"{self._path}, line {self._block(block)[offset][0]}"

    def _read_block(self, block: int) -> list[tuple[int, bytes]]:
        """The rows of a block, with the numbers of their lines."""
        if _state(fstat(self._file.fileno())) != self._state:
            raise DataError(f"{self._path} has changed since it was opened; start again.")
        self._file.seek(self._starts[block])
        text = self._file.read(self._starts[block + 1] - self._starts[block])
        lines = enumerate(text.split(b"\n"), start=self._lines[block])
        return [(number, line) for number, line in lines if line.strip()]


class JsonRows(Rows):
    """A file that is one list of JSON objects, which is held in memory.

    Raises:
        DataError: the file cannot be read, or is no list.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path), opened(path) as file:
            text = file.read()
        self.fingerprint = hashlib.blake2b(text, digest_size=16).hexdigest()
        items = read_json_bytes(text.removeprefix(_BOM), str(path))
        if not isinstance(items, list):
            raise DataError(
                f"{path} is {_kind(items)}, not a list of objects; write one object a line (.jsonl)."
            )
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def row(self, number: int) -> Row:
        """The row with a number."""
        return _object(self._items[number], self.where(number))

    def where(self, number: int) -> str:
        """The file and the number of the item, from 1 on."""
        return f"{self._path}, item {number + 1}"


def _parts_of(text: bytes) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """The offset of each part between ends of lines, and whether it is not blank. The last one may go on."""
    bytes_B = np.frombuffer(text + b"\n", np.uint8)
    ends = np.flatnonzero(bytes_B == ord("\n"))
    offsets = np.append(0, ends[:-1] + 1)
    are_rows = ~_IS_SPACE[bytes_B[offsets]]
    for part in np.flatnonzero(~are_rows):
        are_rows[part] = bool(text[offsets[part] : ends[part]].strip())
    return offsets, are_rows


def is_list(path: Path) -> bool:
    """Whether a JSON file begins as a list; the suffix .json is used for lists and for JSON lines."""
    with reading(path), opened(path) as file:
        for text in iter(lambda: file.read(4096), b""):
            if stripped := text.removeprefix(_BOM).lstrip():
                return stripped.startswith(b"[")
    return False


def read_object(line: bytes, where: str) -> Row:
    """The JSON object of a line.

    Raises:
        DataError: the line is no JSON object.
    """
    return _object(read_json_bytes(line, where), where)


def read_json_bytes(text: bytes, where: str) -> JSON:
    """The value of a JSON text.

    Raises:
        DataError: the text is no JSON.
    """
    try:
        value: JSON = json.loads(text.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8.") from None
    except RecursionError:
        raise DataError(f"{where}: it is nested too deep to be read.") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: no JSON: {_lowered(error.msg)} at character {error.pos + 1}; mend it."
        ) from None
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}; mend it.") from None
    return value


def _object(value: JSON, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f'{where}: {_kind(value)}, not an object such as {{"input": "..."}}; mend it.')
    return value


def _kind(value: JSON) -> str:
    names = {list: "a list", dict: "an object", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _state(stat: stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
