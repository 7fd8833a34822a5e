"""Rows that Python code gives, as a file: a run that goes on, in another process, reads them again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.runtime.temporary import temporary_file


def write_rows(name: str, rows: object, folder: Path) -> Path:
    """Write rows as JSON lines to a file of the folder, whose name is the hash of what it holds.

    name: of the setting, for error texts. rows: mappings of columns, such as a list of them or a dataset of
    `datasets`. folder: is made.

    Raises:
        ConfigError: they are no rows, or a row holds what JSON cannot; the folder cannot be written.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_file(".rows-", folder) as part:
            with part.open("w", encoding="utf-8") as file:
                for line in _lines(name, rows):
                    digest.update(line.encode())
                    file.write(line)
            path = folder / f"rows-{digest.hexdigest()}.jsonl"
            os.replace(part, path)
    except OSError as error:
        raise ConfigError(
            f"{name}: its rows cannot be written to {folder} ({error.strerror}); make room there, or name "
            "another output_dir."
        ) from error
    return path


def _lines(name: str, rows: object) -> Iterable[str]:
    if not isinstance(rows, Iterable) or hasattr(rows, "to_records"):
        frame = "; of a data frame pass to_dict('records')" if hasattr(rows, "to_records") else ""
        raise ConfigError(
            f"{name} is a {type(rows).__name__}, neither a path nor rows; pass a list of mappings, such as "
            f'[{{"input": "2 + 2?"}}]{frame}.'
        )
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{name}: row {number} is a {type(row).__name__}; a row is a mapping of columns, such as "
                '{"input": "2 + 2?"}.'
            )
        try:
            yield f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)}\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name}: row {number} cannot be written as JSON ({error}).") from None


def _plain(value: object) -> object:
    """What JSON holds for a value of another type, as of a column of a data frame or a dataset."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}"
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    raise TypeError(f"a {type(value).__name__} is neither text, number, list nor mapping")
