"""Opens the rows of a path: a file, a glob pattern, or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path

from agentrl.data.rows.arrow import ArrowRows
from agentrl.data.rows.base import Chained, Rows
from agentrl.data.rows.folder import ARROW, KINDS, LINES, PARQUET, TABLE, files_of, kind_of
from agentrl.data.rows.jsonl import JsonlRows, JsonRows, is_list
from agentrl.data.rows.parquet import ParquetRows
from agentrl.data.rows.table import TableRows
from agentrl.errors import DataError
from agentrl.runtime.extras import require
from agentrl.runtime.files import check_fetched


def open_rows(path: str, columns: Sequence[str], *, split: str) -> Rows:
    """The rows of a file, of the files that match a pattern (`data/train-*.parquet`), or of a folder.

    columns: the names of the columns to read. split: of a folder that holds several splits.

    Raises:
        DataError: there is no such file, or its format is not supported.
    """
    files = _files(path, split)
    check_fetched(files, DataError)
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise DataError(f"{path} holds {' and '.join(sorted(kinds))} files; name those of one kind.")
    if kinds == {PARQUET}:
        # One object for all files, so that they share its cache.
        return ParquetRows(files, columns)
    parts = [_open_file(file, columns) for file in files]
    return parts[0] if len(parts) == 1 else Chained(parts)


def check_rows(path: str) -> None:
    """Check that a path has files, and that what reads them is installed; nothing is read.

    Raises:
        DataError: there is no such file.
        MissingExtraError: the package that reads it is missing.
    """
    target = Path(path)
    files = [target] if target.exists() else _files(path, "")
    if {kind_of(file) for file in files} & {ARROW, PARQUET}:
        require(f"reading {path}", "pyarrow")


def _files(path: str, split: str) -> Sequence[Path]:
    target = Path(path)
    if target.is_dir():
        files = files_of(target, split)
    elif target.exists():
        files = [target]
    else:
        files = [Path(match) for match in sorted(glob(path, recursive=True))] if "*" in path else []
    if not files:
        raise DataError(f"there is no file or folder {path}; check the path.")
    return files


def _kind(path: Path) -> str:
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"{path}: prompts are read from {', '.join(KINDS)} files, and from those of text under gzip "
            "(.jsonl.gz); convert it."
        )
    return kind


def _open_file(path: Path, columns: Sequence[str]) -> Rows:
    kind = _kind(path)
    if kind == ARROW:
        return ArrowRows(path, columns)
    if kind == TABLE:
        return TableRows(path)
    return JsonlRows(path) if kind == LINES or not is_list(path) else JsonRows(path)
