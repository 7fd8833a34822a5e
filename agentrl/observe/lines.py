"""Files of one JSON value a line that an interruption leaves readable.

Lines reach the file in one write at its end. A line torn by a crash is taken away before
the next one is written, and passed over by whoever reads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from agentrl.types import JSON

_NON_FINITE: Final = "$float"


def to_line(value: object) -> bytes:
    """One line of valid JSON in UTF-8, the newline included.

    JSON has no NaN and no infinities: they stand as {"$float": "nan"}. Text that is no
    Unicode (lone surrogates) makes its line pure ASCII. Numpy values become Python's; what
    JSON cannot say at all, such as a date in a task's metadata, becomes its str().
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_spell_out(value), ensure_ascii=False, allow_nan=False, default=_plain)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(json.loads(text)).encode() + b"\n"


def from_line(line: bytes) -> JSON:
    """What `to_line` wrote.

    Raises:
        ValueError: the line is not JSON.
    """
    text = line.decode()
    value: JSON = json.loads(text, object_hook=_read_float if f'"{_NON_FINITE}"' in text else None)
    return value


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Add whole lines at the end of a file, creating it; a torn last line is removed first.

    Raises:
        OSError: the file cannot be written.
    """
    data = b"".join(lines)
    with path.open("ab+", buffering=0) as file:
        _cut_torn_line(file.fileno())
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]


def read(path: Path) -> Iterator[JSON]:
    """Every whole line, in order. A torn last line is passed over.

    Raises:
        ValueError: a line before the last is not JSON, with its number.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield from_line(line)
            except ValueError as error:
                raise ValueError(f"{path.name} line {number} is not JSON: {error}") from None


def _cut_torn_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    if not end or os.pread(descriptor, 1, end - 1) == b"\n":
        return
    whole = os.pread(descriptor, end, 0).rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _spell_out(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return _spell_out(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {_NON_FINITE: repr(value)}
    if isinstance(value, dict):
        return {key: _spell_out(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(below) for below in value]
    return value


def _read_float(found: dict[str, JSON]) -> JSON:
    spelled = found.get(_NON_FINITE)
    if len(found) == 1 and isinstance(spelled, str) and spelled in {"nan", "inf", "-inf"}:
        return float(spelled)
    return dict(found)
