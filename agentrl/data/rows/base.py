"""What all kinds of files have in common: rows by their number, each with a place that a person finds."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from agentrl.types import JSON

Row = Mapping[str, JSON]


class Rows(ABC):
    """Rows by their number from 0 on, in any order."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the content."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def row(self, number: int) -> Row:
        """One of them.

        Raises:
            DataError: it cannot be read; the sentence says where it stands.
        """

    @abstractmethod
    def where(self, number: int) -> str:
        """Where a row stands: its file, and its number there."""

    @property
    def pieces(self) -> Sequence[int] | None:
        """How many rows are read at once, stretch after stretch; None = each by itself."""
        return None

    def expect(self, numbers: Sequence[int]) -> None:
        """Rows near these are read next. Changes what is kept in memory, and no result."""
        del numbers


class Sliced(Rows):
    """The rows from `start` up to `stop`."""

    def __init__(self, rows: Rows, start: int | None, stop: int | None) -> None:
        self._rows = rows
        self._range = range(len(rows))[start:stop]

    @property
    def fingerprint(self) -> str:
        """Of the whole, and the bounds."""
        return f"{self._rows.fingerprint}[{self._range.start}:{self._range.stop}]"

    def __len__(self) -> int:
        return len(self._range)

    def row(self, number: int) -> Row:
        """One of them."""
        return self._rows.row(self._range[number])

    def where(self, number: int) -> str:
        """Where it stands in the whole."""
        return self._rows.where(self._range[number])

    @property
    def pieces(self) -> Sequence[int] | None:
        """Those of the whole, as far as they are inside."""
        whole = self._rows.pieces
        if whole is None:
            return None
        ends = [min(max(end, self._range.start), self._range.stop) for end in accumulate(whole)]
        sizes = [end - before for before, end in zip([self._range.start, *ends], ends, strict=False)]
        return [size for size in sizes if size]

    def expect(self, numbers: Sequence[int]) -> None:
        """The same, of the whole."""
        self._rows.expect([self._range[number] for number in numbers])


class Chained(Rows):
    """The rows of several files, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = tuple(parts)
        self._ends = tuple(accumulate(map(len, self._parts)))

    @property
    def fingerprint(self) -> str:
        """Of all, in their order."""
        text = " ".join(part.fingerprint for part in self._parts)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> Row:
        """One of them."""
        part, own = self._place(number)
        return part.row(own)

    def where(self, number: int) -> str:
        """Where it stands in its file."""
        part, own = self._place(number)
        return part.where(own)

    def _place(self, number: int) -> tuple[Rows, int]:
        part = bisect_right(self._ends, number)
        return self._parts[part], number - (self._ends[part - 1] if part else 0)
