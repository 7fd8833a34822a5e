"""What Parquet and Arrow files share: columns, values that JSON can say, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.data.rows.base import Row
from agentrl.errors import DataError, did_you_mean
from agentrl.types import JSON

if TYPE_CHECKING:
    import pyarrow as pa

_HASHED_WHOLE = 256 << 20
_BLOCKS = 256
_BLOCK = 64 << 10
_END = 4 << 20
"""Bytes of the end of a large file that are hashed: Parquet and Arrow keep their tables of contents there."""


def fingerprint_of(path: Path) -> str:
    """A hash of a file: of every byte, or of a large one its size, its end and 256 blocks of it."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _HASHED_WHOLE:
            while text := file.read(1 << 20):
                digest.update(text)
            return digest.hexdigest()
        for start in (*range(0, size, size // _BLOCKS), size - _END):
            file.seek(start)
            digest.update(file.read(_END if start == size - _END else _BLOCK))
    return digest.hexdigest()


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Make what a library says of a broken file one sentence.

    Raises:
        DataError: the block could not read the file.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read as {kind}: {error.strerror or _line(error)}.") from error
    except ValueError as error:
        # pyarrow's ArrowInvalid is one.
        raise DataError(f"{path} cannot be read as {kind}: {_line(error)}.") from error


def chosen_columns(path: Path, there: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns that hold what is wanted; of a dotted name that is no column, the first part.

    Raises:
        DataError: the file has no such column.
    """
    chosen: dict[str, None] = {}
    for name in wanted:
        column = name if name in there else name.partition(".")[0]
        if column not in there:
            raise DataError(
                f"{path}: there is no `{name}`.{did_you_mean(name, there)} It has "
                f"{', '.join(f'`{one}`' for one in there)}: name one with input_key, label_key, metadata_key "
                "or tool_key."
            )
        chosen[column] = None
    return tuple(chosen)


def row_of(batch: pa.RecordBatch, number: int, where: str) -> Row:
    """A row of a batch as JSON.

    Raises:
        DataError: it holds what JSON has no form for.
    """
    (found,) = batch.slice(number, 1).to_pylist()
    return {name: _plain(value, f"{where}: `{name}`") for name, value in found.items()}


def _plain(value: object, what: str) -> JSON:
    """A value as JSON; fields of a struct that are null are left out, for every row has all of them."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(below, what) for name, below in value.items() if below is not None}
    if isinstance(value, list | tuple):
        return [_plain(below, what) for below in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise DataError(f"{what} holds {type(value).__name__}, which is neither text, number, list nor object.")


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].removesuffix(".")
