"""The interface of all row formats: rows by number, each with a location for error messages."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from agentrl.types import JSON

Row = Mapping[str, JSON]


class Rows(ABC):
    """Rows by their number from 0 on, in any order. fingerprint: identifies the content."""

    fingerprint: str

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def row(self, number: int) -> Row:
        """The row with a number.

        Raises:
            DataError: the row cannot be read; the message has its location.
        """

    @abstractmethod
    def where(self, number: int) -> str:
        """The location of a row: its file, and its number in that file."""

    @property
    def pieces(self) -> Sequence[int] | None:
        """Rows of each piece that is read at once; None = rows have random access."""
        return None

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Load the pieces of these rows, which are read next. Affects the cache only, no result."""
        del numbers


class Sliced(Rows):
    """The rows from `start` up to `stop`."""

    def __init__(self, rows: Rows, start: int | None, stop: int | None) -> None:
        self._rows = rows
        self._range = range(len(rows))[start:stop]
        self.fingerprint = f"{rows.fingerprint}[{self._range.start}:{self._range.stop}]"

    def __len__(self) -> int:
        return len(self._range)

    def row(self, number: int) -> Row:
        """The row with a number."""
        return self._rows.row(self._range[number])

    def where(self, number: int) -> str:
        """The location of the row in its file."""
        return self._rows.where(self._range[number])

    @property
    def pieces(self) -> Sequence[int] | None:
        """The pieces of all rows, cut to the slice."""
        sizes = self._rows.pieces
        if sizes is None:
            return None
        ends = [min(max(end, self._range.start), self._range.stop) for end in accumulate(sizes)]
        cut_sizes = [end - before for before, end in zip([self._range.start, *ends], ends, strict=False)]
        return [size for size in cut_sizes if size]

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Load the pieces of these rows of the slice."""
        self._rows.prefetch([self._range[number] for number in numbers])


class Chained(Rows):
    """The rows of several files, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = tuple(parts)
        self._ends = tuple(accumulate(map(len, self._parts)))
        text = " ".join(part.fingerprint for part in self._parts)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> Row:
        """The row with a number."""
        part, offset = self._part_at(number)
        return part.row(offset)

    def where(self, number: int) -> str:
        """The location of the row in its file."""
        part, offset = self._part_at(number)
        return part.where(offset)

    def _part_at(self, number: int) -> tuple[Rows, int]:
        part = bisect_right(self._ends, number)
        return self._parts[part], number - (self._ends[part - 1] if part else 0)
