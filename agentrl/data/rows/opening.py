"""From a path to rows: by the name of a file, by a pattern, or by what a folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path

from agentrl.data.rows.arrow import ArrowRows
from agentrl.data.rows.base import Chained, Rows
from agentrl.data.rows.folder import ARROW, KINDS, LINES, PARQUET, files_of
from agentrl.data.rows.jsonl import JsonlRows, JsonRows, is_list
from agentrl.data.rows.parquet import ParquetRows
from agentrl.errors import DataError


def open_rows(path: str, columns: Sequence[str], *, split: str) -> Rows:
    """The rows of a file, of the files that fit a pattern (`data/train-*.parquet`), or of a folder.

    columns: those that will be read. split: of a folder whose files are parted into several.

    Raises:
        DataError: there is no such file, or it is of no kind that can be read.
    """
    files = _files(path, split)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(kinds))} files; name those of one kind.")
    if kinds == {PARQUET}:
        # Together, so that they share what is kept in memory.
        return ParquetRows(files, columns)
    parts = [_opened(file, columns) for file in files]
    return parts[0] if len(parts) == 1 else Chained(parts)


def _files(path: str, split: str) -> Sequence[Path]:
    where = Path(path)
    if where.is_dir():
        found = files_of(where, split)
    elif where.exists():
        found = [where]
    else:
        found = [Path(one) for one in sorted(glob(path, recursive=True))] if "*" in path else []
    if not found:
        raise DataError(f"there is no file or folder {path}; check the path.")
    return found


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in KINDS:
        raise DataError(f"{path}: prompts are read from {', '.join(KINDS)} files; convert it.")
    return KINDS[suffix]


def _opened(path: Path, columns: Sequence[str]) -> Rows:
    kind = _kind(path)
    if kind == ARROW:
        return ArrowRows(path, columns)
    return JsonlRows(path) if kind == LINES or not is_list(path) else JsonRows(path)
