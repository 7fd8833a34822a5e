"""Common code for Parquet and Arrow files: columns, conversion to JSON, fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agentrl.data.rows.base import Row
from agentrl.errors import DataError, did_you_mean
from agentrl.types import JSON

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_FULLY_HASHED = 256 << 20
_BLOCKS = 256
_BLOCK = 64 << 10
_END = 4 << 20
"""Bytes hashed at the end of a large file, where Parquet and Arrow store their tables of contents."""

_NARROW: Mapping[str, type[np.floating]] = {"float": np.float32, "halffloat": np.float16}
"""Numbers of 32 and of 16 bits, by the names of their types in Arrow."""


def fingerprint_of(path: Path) -> str:
    """A hash of a file: of every byte; of a large file, of its size, its end and 256 blocks."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _MAX_FULLY_HASHED:
            while text := file.read(1 << 20):
                digest.update(text)
            return digest.hexdigest()
        for start in (*range(0, size, size // _BLOCKS), size - _END):
            file.seek(start)
            digest.update(file.read(_END if start == size - _END else _BLOCK))
    return digest.hexdigest()


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Convert errors of a library, about an invalid file, to one sentence.

    Raises:
        DataError: the block failed to read the file.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read as {kind}: {error.strerror or _line(error)}.") from error
    except ValueError as error:
        # pyarrow's ArrowInvalid is a ValueError.
        raise DataError(f"{path} cannot be read as {kind}: {_line(error)}.") from error


def chosen_columns(path: Path, available: Sequence[str], requested: Sequence[str]) -> tuple[str, ...]:
    """The columns with the requested names; for a dotted name that is no column, its first part.

    Raises:
        DataError: the file has no such column.
    """
    chosen: dict[str, None] = {}
    for name in requested:
        column = name if name in available else name.partition(".")[0]
        if column not in available:
            raise DataError(
                f"{path}: there is no `{name}`.{did_you_mean(name, available)} It has "
                f"{', '.join(f'`{other}`' for other in available)}: name one with input_key, label_key, "
                "metadata_key or tool_key (of conversations: messages_key or tools_key)."
            )
        chosen[column] = None
    return tuple(chosen)


def row_of(batch: pa.RecordBatch, number: int, where: str) -> Row:
    """A row of a batch as JSON.

    Raises:
        DataError: the row has a value that JSON cannot represent.
    """
    (record,) = batch.slice(number, 1).to_pylist()
    types = dict(zip(batch.schema.names, batch.schema.types, strict=True))
    return {name: _plain(value, f"{where}: `{name}`", types[name]) for name, value in record.items()}


def _plain(value: object, what: str, kind: object) -> JSON:
    """A value as JSON; null fields of a struct are left out, since every row has all fields of the struct.

    kind: its type in Arrow; None = unknown.
    """
    if isinstance(value, float):
        # As a double, the 0.1 of 32 bits would be 0.10000000149011612.
        narrow = _NARROW.get(str(getattr(kind, "value_type", kind)))
        return value if narrow is None else float(str(narrow(value)))
    if isinstance(value, str | int | None):
        return value
    if isinstance(value, Mapping):
        fields = {str(name): field for name, field in value.items() if field is not None}
        return {name: _plain(field, what, _type_of(kind, name)) for name, field in fields.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, what, getattr(kind, "value_type", None)) for item in value]
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}"
    raise DataError(f"{what} holds {type(value).__name__}, which is neither text, number, list nor object.")


def _type_of(struct: object, name: str) -> object:
    field = getattr(struct, "field", None)
    return field(name).type if callable(field) else None


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].removesuffix(".")
