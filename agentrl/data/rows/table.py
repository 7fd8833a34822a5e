"""Tables as text: a header with the names of the columns, then rows, whose cells are text."""

from __future__ import annotations

import csv
import hashlib
import io
from pathlib import Path

from agentrl.data.rows.base import Row, Rows
from agentrl.data.rows.packed import opened, reading
from agentrl.errors import DataError

_MAX_CELL = 64 << 20
_TABS = ".tsv"


class TableRows(Rows):
    """A .csv file, or a .tsv file with tabs, which is held in memory. A cell is text: `007` stays `007`.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or a row has not as many cells as the header.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path), opened(path) as file:
            content = file.read()
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8.") from None
        self._rows, self._lines = self._parsed(text, "\t" if _TABS in path.suffixes else ",")

    def _parsed(self, text: str, delimiter: str) -> tuple[list[Row], list[int]]:
        """The rows, and the number of the line in which each ends."""
        csv.field_size_limit(_MAX_CELL)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows: list[Row] = []
        lines: list[int] = []
        header: list[str] = []
        try:
            for cells in filter(None, reader):
                if not header:
                    header = self._checked(cells)
                    continue
                if len(cells) != len(header):
                    raise DataError(
                        f"{self._path}, line {reader.line_num}: {len(cells)} cells under {len(header)} "
                        'columns; put a cell that holds the delimiter or a quote in double quotes, as "a, b".'
                    )
                rows.append(dict(zip(header, cells, strict=True)))
                lines.append(reader.line_num)
        except csv.Error as error:
            raise DataError(f"{self._path}, line {reader.line_num}: {error}; mend it.") from None
        return rows, lines

    def _checked(self, header: list[str]) -> list[str]:
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise DataError(f"{self._path}: two columns are called `{twice}`; rename one.")
        return header

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """The row with a number."""
        return self._rows[number]

    def where(self, number: int) -> str:
        """The file and the number of the line, from 1 on."""
        return f"{self._path}, line {self._lines[number]}"
