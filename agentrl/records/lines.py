"""Files of JSON lines that stay readable after an interruption.

Lines are appended in one write. A line that a crash left incomplete is removed before the next one is
written, and skipped when the file is read.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError, from_json, to_json

from agentrl.errors import RecordError
from agentrl.runtime.ownership import open_file
from agentrl.types import JSON

T = TypeVar("T")
_NON_FINITE: Final = "$float"
_MARK: Final = b'"$float"'
_NON_JSON = re.compile(rb"(?:^|[:,\[])-?(?:NaN|Infinity)")
"""Constants that JSON does not have. A match inside a text only costs the slower path."""
_PIECE: Final = 4096
_MAX_LINE_BYTES: Final = 1 << 30


def to_line(value: object) -> bytes:
    """One line of valid JSON in UTF-8, the newline included.

    JSON has no NaN and no infinities: they are written as {"$float": "nan"}. Text that is no
    Unicode (lone surrogates) makes its line pure ASCII. Numpy values become Python's; values
    without a form in JSON, such as a date in a task's metadata, become text.
    """
    # pydantic_core is several times as fast as `json`.
    with suppress(PydanticSerializationError, UnicodeEncodeError):
        line = b"".join(_pieces(value)) + b"\n"
        if (b"NaN" not in line and b"Infinity" not in line) or not _NON_JSON.search(line):
            return line
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_encode_floats(value), ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(json.loads(text)).encode() + b"\n"


def from_line(line: bytes) -> JSON:
    """Parse a line of `to_line`.

    Raises:
        ValueError: the line is not JSON, or nested too deeply.
    """
    try:
        return _parsed(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_json(adapter: TypeAdapter[T], value: T) -> JSON:
    """A value as JSON, as it comes back from a line.

    Pydantic's own mode for JSON turns keys that are no Unicode, which models write, into other keys.
    """
    return from_line(to_line(adapter.dump_python(value, warnings="none")))


def has_marks(line: bytes) -> bool:
    """Whether a line may hold a number that JSON does not have."""
    # Finding one byte takes a twentieth of the time that several take.
    return b"$" in line and _MARK in line


def _parsed(line: bytes) -> JSON:
    if has_marks(line):
        value: JSON = json.loads(line.decode(), object_hook=_read_float)
        return value
    try:
        value = from_json(line, cache_strings="keys")
    except ValueError:
        # `json` takes some of it, such as halves of surrogate pairs, and says what is wrong with the rest.
        value = json.loads(line.decode())
    return value


def object_of(line: bytes, place: str) -> dict[str, JSON]:
    """The object in a line. place: of the line, for the sentence.

    Raises:
        RecordError: it holds none.
    """
    try:
        value = from_line(line)
    except ValueError as error:
        raise RecordError(f"{place} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{place} holds no object")
    return value


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Append complete lines to a file, creating it; an incomplete last line is removed first.

    Raises:
        OSError: the file cannot be written.
    """
    data = b"".join(lines)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        _remove_incomplete_line(descriptor)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[dict[str, JSON]]:
    """The object in every complete line, in order. An incomplete last line is skipped.

    Raises:
        OSError: the file cannot be read.
        RecordError: it is a link; or a line before the last, whose number it names, holds no object of JSON,
            or is longer than a gibibyte.
    """
    with open_file(path) as file:
        for number in count(1):
            line = file.readline(_MAX_LINE_BYTES + 1)
            if len(line) > _MAX_LINE_BYTES:
                raise RecordError(f"{path} line {number} has more than {_MAX_LINE_BYTES:,} bytes")
            if not line.endswith(b"\n"):
                return
            yield object_of(line, f"{path} line {number}")


def _remove_incomplete_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    if not end or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    length = os.pread(descriptor, end, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, length)


def _pieces(value: object) -> Iterator[bytes]:
    """The JSON of a value in short pieces, so that other threads can run between them."""
    if type(value) is dict and value:
        opening = b"{"
        for key, item in value.items():
            yield opening + _dumped(str(key)) + b":"
            yield from _pieces(item)
            opening = b","
        yield b"}"
    elif type(value) is list and value and type(value[0]) is dict:
        opening = b"["
        for item in value:
            yield opening
            yield from _pieces(item)
            opening = b","
        yield b"]"
    elif type(value) is list and len(value) > _PIECE:
        opening = b"["
        for start in range(0, len(value), _PIECE):
            yield opening + _dumped(value[start : start + _PIECE])[1:-1]
            opening = b","
        yield b"]"
    else:
        yield _dumped(value)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


_dumped = partial(to_json, inf_nan_mode="constants", fallback=_plain)


def _encode_floats(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return _encode_floats(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {_NON_FINITE: repr(value)}
    if isinstance(value, dict):
        return {key: _encode_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_floats(item) for item in value]
    return value


def _read_float(value: dict[str, JSON]) -> JSON:
    text = value.get(_NON_FINITE)
    if len(value) == 1 and isinstance(text, str) and text in {"nan", "inf", "-inf"}:
        return float(text)
    return dict(value)
