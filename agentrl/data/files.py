"""Files of prompts as a source, and as a list of tasks."""

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
_CHECKED_WHOLE = 20_000
_CHECKED = 1_000


class Place(NamedTuple):
    """A file or a folder, and which of its rows: `path@[start:stop]`, as Python slices a list."""

    path: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def of(cls, text: str) -> Place:
        """Read what a setting says.

        Raises:
            DataError: what follows the path is no slice.
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

    place: `path` or `path@[start:stop]`. split: of a folder whose files are parted into several.

    Raises:
        DataError: it cannot be read, or holds no rows. With `is_checked` a row is no prompt: all are looked
            at
            now, of more than 20,000 the first 1,000.
    """

    def __init__(
        self,
        place: str,
        columns: Columns,
        *,
        seed: int = 0,
        shuffle: bool = True,
        split: str = "train",
        is_checked: bool = True,
    ) -> None:
        super().__init__(seed=seed)
        path, start, stop = Place.of(place)
        self._path, self._columns, self._split, self._shuffle = path, columns, split, shuffle
        whole = open_rows(path, columns.names, split=split)
        self._rows: Rows = whole if start is None and stop is None else Sliced(whole, start, stop)
        self._first = range(len(whole))[start:stop].start
        if not len(self._rows):
            held = f"of its {len(whole):,} rows" if len(whole) else "there are no rows"
            raise DataError(f"{place} holds no prompts ({held}); check the file and the slice.")
        self._order = self._ordered()
        self._soon: Sequence[int] = ()
        if is_checked:
            count = len(self._rows)
            for number in range(count if count <= _CHECKED_WHOLE else _CHECKED):
                self.task_of_row(number)

    @property
    def fingerprint(self) -> str:
        """A hash of the rows, of the columns that are read, and of whether they are shuffled."""
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
        soon = self._order.soon(epoch, position)
        if soon != self._soon:
            self._rows.expect(soon)
            self._soon = soon
        return self.task_of_row(self._order.row(epoch, position))

    def task_of_row(self, number: int) -> Task:
        """The task of a row, by its place in the file or the slice.

        Raises:
            DataError: it is no prompt.
        """
        row, where = self._rows.row(number), self._rows.where(number)
        return self._columns.task(
            row, id=f"{self._path}:{self._first + number}", split=self._split, where=where
        )

    def _ordered(self) -> Order:
        if not self._shuffle:
            return InOrder()
        pieces = self._rows.pieces
        return Shuffled(len(self._rows), self.seed) if pieces is None else Windowed(pieces, self.seed)
