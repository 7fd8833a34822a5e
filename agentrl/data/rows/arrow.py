"""Arrow files in the format of `datasets`, memory-mapped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.data.rows.base import Row, Rows
from agentrl.data.rows.columnar import chosen_columns, fingerprint_of, reading, row_of
from agentrl.runtime.extras import require

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
"""The magic number of the file format, which has a table of contents; other files are streams of batches."""


class ArrowRows(Rows):
    """The rows of an Arrow file, or of a stream in a file.

    columns: the names of the columns to read.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: the file cannot be read, or lacks a column.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        require("reading .arrow files", "pyarrow")
        self._path = path
        with reading(path, "Arrow"):
            self.fingerprint = fingerprint_of(path)
            self._batches = _batches(path, columns)
        self._ends = [*accumulate(batch.num_rows for batch in self._batches)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Row:
        """The row with a number."""
        batch = bisect_right(self._ends, number)
        within = number - (self._ends[batch - 1] if batch else 0)
        return row_of(self._batches[batch], within, self.where(number))

    def where(self, number: int) -> str:
        """The file and the number of the row, from 1 on."""
        return f"{self._path}, row {number + 1}"


def _batches(path: Path, columns: Sequence[str]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    with path.open("rb") as file:
        has_contents = file.read(len(_MAGIC)) == _MAGIC
    mapped = pa.memory_map(str(path))
    if has_contents:
        reader = pa.ipc.open_file(mapped)
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
    else:
        reader = pa.ipc.open_stream(mapped)
        batches = list(reader)
    chosen = list(chosen_columns(path, reader.schema.names, columns))
    return [batch.select(chosen) for batch in batches]
