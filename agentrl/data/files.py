"""Files of prompts as a source of tasks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.data.columns import Columns
from agentrl.data.order import InOrder, Order, Shuffled, Windowed
from agentrl.data.rows import Rows, Sliced, open_rows
from agentrl.data.source import DataSource
from agentrl.errors import DataError
from agentrl.types import Task

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_MAX_FULLY_CHECKED = 20_000
_NUM_CHECKED = 1_000


class SlicedPath(NamedTuple):
    """The path of a file or a folder, and a slice of its rows: `path@[start:stop]`, as of a Python list."""

    path: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def of(cls, text: str) -> SlicedPath:
        """Parse the text of a setting.

        Raises:
            DataError: the text after the path is no slice.
        """
        match = _SLICE.fullmatch(text)
        if match is None:
            if "@[" in text:
                raise DataError(
                    f"`{text}`: a slice is path@[start:stop], such as {text.partition('@[')[0]}@[0:100]."
                )
            return cls(text)
        bounds = [int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop")]
        return cls(match["path"], *bounds)


class FileSource(DataSource):
    """The prompts of a file or a folder: every epoch goes through all rows.

    path: of a file or a folder, or `path@[start:stop]`. split: of a folder that holds several splits.
    is_checked: whether rows are parsed now: all of them; of more than 20,000, the first 1,000.

    Raises:
        DataError: the file cannot be read, or holds no rows; a row that is checked is no prompt.
    """

    def __init__(
        self,
        path: str,
        columns: Columns,
        *,
        seed: int = 0,
        shuffle: bool = True,
        split: str = "train",
        is_checked: bool = True,
    ) -> None:
        super().__init__(seed=seed)
        self._path, start, stop = SlicedPath.of(path)
        self._columns, self._split, self._shuffle = columns, split, shuffle
        rows = open_rows(self._path, columns.names, split=split)
        self._rows: Rows = rows if start is None and stop is None else Sliced(rows, start, stop)
        self._first = range(len(rows))[start:stop].start
        if not len(self._rows):
            detail = f"of its {len(rows):,} rows" if len(rows) else "there are no rows"
            raise DataError(f"{path} holds no prompts ({detail}); check the file and the slice.")
        self._order = self._make_order()
        self._prefetched: Sequence[int] = ()
        if is_checked:
            count = len(self._rows)
            for number in range(count if count <= _MAX_FULLY_CHECKED else _NUM_CHECKED):
                self.task_of_row(number)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows, of the names of the columns, and of whether the rows are shuffled."""
        text = f"{self._rows.fingerprint} {self._columns} {self._shuffle}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_tasks(self) -> int:
        """Tasks of an epoch."""
        return len(self._rows)

    def task(self, ordinal: int) -> Task:
        """The task of a number.

        Raises:
            DataError: its row is no prompt.
        """
        epoch, position = divmod(ordinal, len(self._rows))
        upcoming = self._order.upcoming(epoch, position)
        if upcoming != self._prefetched:
            self._rows.prefetch(upcoming)
            self._prefetched = upcoming
        return self.task_of_row(self._order.row(epoch, position))

    def task_of_row(self, number: int) -> Task:
        """The task of a row, by its number in the file or the slice.

        Raises:
            DataError: the row is no prompt.
        """
        id, where = f"{self._path}:{self._first + number}", self.where(number)
        return self._columns.task(self._rows.row(number), id=id, split=self._split, where=where)

    def where(self, number: int) -> str:
        """The location of a row, by its number in the file or the slice: a file, and its line or row."""
        return self._rows.where(number)

    def _make_order(self) -> Order:
        if not self._shuffle:
            return InOrder()
        pieces = self._rows.pieces
        return Shuffled(len(self._rows), self.seed) if pieces is None else Windowed(pieces, self.seed)
