"""From a path to rows: by the name of the file, or by what a folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.data.rows.base import Rows
from agentrl.data.rows.jsonl import JsonlRows, JsonRows, is_list
from agentrl.errors import DataError

_LINES = (".jsonl", ".ndjson")


def open_rows(path: str, columns: Sequence[str], *, split: str) -> Rows:
    """The rows of a file.

    columns: those that will be read. split: of a folder whose files are parted into several.

    Raises:
        DataError: there is no such file, or it is of no kind that can be read.
    """
    del columns, split
    where = Path(path)
    if not where.exists():
        raise DataError(f"there is no file or folder {path}; check the path.")
    suffix = where.suffix.lower()
    if suffix in _LINES:
        return JsonlRows(where)
    if suffix == ".json":
        return JsonRows(where) if is_list(where) else JsonlRows(where)
    raise DataError(f"{path}: prompts are read from .jsonl and .json files; convert it.")
