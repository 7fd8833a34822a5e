"""Answers as text: one row a line, ` | ` between its cells; and their comparison with the right rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Rows = Sequence[Sequence[object]]

MOST_CHARS = 5000
_SEPARATOR = "|"


def as_text(rows: Rows) -> str:
    """The rows as an answer is written."""
    return "\n".join(f" {_SEPARATOR} ".join(map(str, row)) for row in rows)


def is_right(answer: str, rows: Rows, *, is_ordered: bool) -> bool:
    """Whether an answer has the same rows: each cell, and their order where it counts.

    Capitals and blanks around a cell do not count; numbers are compared to two decimals. An answer of more
    than `MOST_CHARS` characters is wrong.
    """
    if len(answer) > MOST_CHARS:
        return False
    found = [_row(line.split(_SEPARATOR)) for line in answer.splitlines() if line.strip()]
    expected = [_row(row) for row in rows]
    return found == expected if is_ordered else Counter(found) == Counter(expected)


def _row(cells: Sequence[object]) -> tuple[str, ...]:
    return tuple(_comparable(str(cell)) for cell in cells)


def _comparable(cell: str) -> str:
    """A number to two decimals, other text in lower case."""
    text = " ".join(cell.split()).casefold()
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return text
    return f"{number + 0.0:.2f}" if math.isfinite(number) else text
