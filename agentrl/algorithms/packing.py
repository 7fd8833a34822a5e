"""Packing of ragged samples into rows, which go through the model together."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Rows of indices into `lengths`, each of at most `max_tokens` tokens; every index once.

    Longest first, and a row is complete when the next one does not fit. Rows are flat, without padding, so
    an unfilled tail costs nothing. It matters that a row's sequences are of like length, which first-fit
    would prevent by filling tails with the shortest ones. A sequence longer than `max_tokens` gets a row of
    its own. The same lengths always give the same rows.

        pack([3, 5, 2, 2], max_tokens=6) -> ((1,), (0, 2), (3,))

    Raises:
        ValueError: `max_tokens` or a length is not positive.
    """
    if max_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and max_tokens must be at least 1, got {list(lengths)} and {max_tokens}")
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if row and filled + lengths[index] > max_tokens:
            rows.append(tuple(row))
            row, filled = [], 0
        row.append(index)
        filled += lengths[index]
    return (*rows, tuple(row)) if row else tuple(rows)
