"""Parquet files, larger than memory: read in pieces of their row groups.

A piece is at most 16,384 rows and about 16 MiB of one row group. A cache holds some decoded pieces. To read a
piece that begins in the middle of a row group, the group is decoded from its start, batch by batch, and the
earlier batches are dropped: the format has no random access inside a row group. So row groups of 100,000
rows are read faster than one of millions.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agentrl.data.order import PIECES_PER_WINDOW
from agentrl.data.rows.base import Row, Rows
from agentrl.data.rows.columnar import chosen_columns, fingerprint_of, reading, row_of
from agentrl.errors import DataError
from agentrl.runtime.extras import require

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PIECE_ROWS = 16_384
_PIECE_BYTES = 16 << 20
_MAX_CACHED = PIECES_PER_WINDOW + 1
_OPEN_FILES = 8
_KIND = "Parquet"


class _Piece(NamedTuple):
    """The location of a piece. batch: the number of batches of its row group before it."""

    file: int
    group: int
    batch: int
    batch_rows: int


class _Cursor(NamedTuple):
    """A row group that is being read. batch: the number of the next batch."""

    file: int
    group: int
    batch: int
    batches: Iterator[pa.RecordBatch]


class ParquetRows(Rows):
    """The rows of Parquet files, one file after another.

    columns: the names of the columns to read.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: a file cannot be read, or lacks a column.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        require("reading .parquet files", "pyarrow")
        self._paths = tuple(paths)
        self._columns: dict[int, tuple[str, ...]] = {}
        self._states: list[tuple[int, int]] = []
        self._pieces: list[_Piece] = []
        self._sizes: list[int] = []
        self._file_ends: list[int] = []
        self._file = lru_cache(maxsize=_OPEN_FILES)(self._open_file)
        digest = hashlib.blake2b(digest_size=16)
        for number, path in enumerate(self._paths):
            with reading(path, _KIND):
                self._states.append(_state(path))
                digest.update(fingerprint_of(path).encode())
                self._index(number, columns)
        self.fingerprint = digest.hexdigest()
        self._ends = list(accumulate(self._sizes))
        self._cached: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._cursor: _Cursor | None = None

    def _open_file(self, number: int) -> pq.ParquetFile:
        import pyarrow.parquet as pq

        # Buffered: a column of a row group is never fully in memory.
        return pq.ParquetFile(self._paths[number], buffer_size=1 << 20, pre_buffer=False)

    def _index(self, number: int, columns: Sequence[str]) -> None:
        file = self._file(number)
        chosen = self._columns[number] = chosen_columns(self._paths[number], file.schema_arrow.names, columns)
        metadata = file.metadata
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            leaves = [row_group.column(k) for k in range(row_group.num_columns)]
            chosen_leaves = [
                leaf
                for leaf in leaves
                if leaf.path_in_schema.split(".")[0] in chosen or leaf.path_in_schema in chosen
            ]
            num_bytes = sum(leaf.total_uncompressed_size for leaf in chosen_leaves)
            rows = max(1, min(PIECE_ROWS, _PIECE_BYTES * row_group.num_rows // max(num_bytes, 1)))
            for batch, start in enumerate(range(0, row_group.num_rows, rows)):
                self._pieces.append(_Piece(number, group, batch, rows))
                self._sizes.append(min(rows, row_group.num_rows - start))
        self._file_ends.append(metadata.num_rows + (self._file_ends[-1] if self._file_ends else 0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Row:
        """The row with a number."""
        piece = bisect_right(self._ends, number)
        within = number - (self._ends[piece - 1] if piece else 0)
        return row_of(self._read(piece), within, self.where(number))

    def where(self, number: int) -> str:
        """The file and the number of the row, from 1 on."""
        file = bisect_right(self._file_ends, number)
        return f"{self._paths[file]}, row {number - (self._file_ends[file - 1] if file else 0) + 1}"

    @property
    def pieces(self) -> Sequence[int]:
        """Rows of each piece."""
        return self._sizes

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Load the pieces of these rows, in the order of the file, so that no row group is decoded twice."""
        for piece in sorted({bisect_right(self._ends, number) for number in numbers}):
            self._read(piece)

    def _read(self, number: int) -> pa.RecordBatch:
        if number in self._cached:
            self._cached.move_to_end(number)
            return self._cached[number]
        piece = self._pieces[number]
        path = self._paths[piece.file]
        if _state(path) != self._states[piece.file]:
            raise DataError(f"{path} has changed since it was opened; start again.")
        while len(self._cached) >= _MAX_CACHED:
            self._cached.popitem(last=False)
        with reading(path, _KIND):
            self._cached[number] = self._decoded(piece)
        return self._cached[number]

    def _decoded(self, piece: _Piece) -> pa.RecordBatch:
        cursor = self._cursor
        if cursor is None or cursor[:2] != piece[:2] or cursor.batch > piece.batch:
            batches = self._file(piece.file).iter_batches(
                piece.batch_rows,
                row_groups=[piece.group],
                columns=self._columns[piece.file],
                use_threads=False,
            )
            cursor = _Cursor(piece.file, piece.group, 0, batches)
        self._cursor = None
        for _ in range(cursor.batch, piece.batch):
            next(cursor.batches)
        batch = next(cursor.batches)
        self._cursor = cursor._replace(batch=piece.batch + 1)
        return batch


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
