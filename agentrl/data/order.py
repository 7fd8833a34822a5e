"""Shuffled orders as functions: each row number is computed; no list of all rows is stored.

    Permutation(n, key)[position]     one shuffled order of 0 ... n - 1
    Shuffled, Windowed, InOrder       the row of a position in an epoch

Rows with random access are shuffled over the full file. A Parquet file is read in pieces of its row groups.
There an epoch takes all pieces in a shuffled order, a few at a time: a window. The rows of a window are
shuffled. So a batch mixes rows of several pieces, and memory holds one window.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

PIECES_PER_WINDOW = 4
_SMALL = 1024
_ROUNDS = 4
_MASK = (1 << 64) - 1


class Permutation:
    """A shuffled order of 0 ... n - 1, drawn by `key`.

    Up to 1,024 numbers are shuffled in a list. More are permuted by a Feistel network on the smallest grid of
    a x b cells that holds n: row and column are shifted alternately, each by a hash of the other. A cell
    beyond n is permuted again (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).
    """

    def __init__(self, n: int, key: str) -> None:
        self._n = n
        self._listed: list[int] | None = None
        if n <= _SMALL:
            self._listed = list(range(n))
            random.Random(key).shuffle(self._listed)
            return
        self._width = isqrt(n - 1) + 1
        self._height = -(-n // self._width)
        digest = hashlib.blake2b(key.encode(), digest_size=16 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[k : k + 8], "little") for k in range(0, len(digest), 8)]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: int) -> int:
        """The number at a position.

        Raises:
            IndexError: there is no such position.
        """
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} of {self._n}")
        if self._listed is not None:
            return self._listed[position]
        cell = self._moved(position)
        while cell >= self._n:
            cell = self._moved(cell)
        return cell

    def _moved(self, cell: int) -> int:
        row, column = divmod(cell, self._width)
        for k in range(0, 2 * _ROUNDS, 2):
            row = (row + _mixed(column ^ self._keys[k])) % self._height
            column = (column + _mixed(row ^ self._keys[k + 1])) % self._width
        return row * self._width + column


def _mixed(value: int) -> int:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of the value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Order(ABC):
    """Maps an epoch and a position to a row."""

    @abstractmethod
    def row(self, epoch: int, position: int) -> int:
        """The number of the row at a position of an epoch."""

    def upcoming(self, epoch: int, position: int) -> Sequence[int]:
        """One row of each piece to prefetch for the next positions; empty without pieces."""
        del epoch, position
        return ()


class InOrder(Order):
    """The rows in the order of the file."""

    def row(self, epoch: int, position: int) -> int:
        """The position itself."""
        del epoch
        return position


class Shuffled(Order):
    """All rows, shuffled anew for every epoch."""

    def __init__(self, n: int, seed: int) -> None:
        self._permutation = lru_cache(maxsize=2)(lambda epoch: Permutation(n, f"order/{seed}/{epoch}"))

    def row(self, epoch: int, position: int) -> int:
        """The number of the row at a position of an epoch."""
        return self._permutation(epoch)[position]


class _Window(NamedTuple):
    """firsts: the first row of each piece. ends: rows of the window up to the end of each piece (count)."""

    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    order: Permutation


class Windowed(Order):
    """Shuffles the pieces, groups `PIECES_PER_WINDOW` of them into a window, and shuffles its rows.

    sizes: rows of each piece, in the order of the file.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes = tuple(sizes)
        self._firsts = (0, *accumulate(self._sizes))
        self._seed = seed
        self._pieces = lru_cache(maxsize=2)(self._arranged)
        self._window = lru_cache(maxsize=4)(self._make_window)

    def row(self, epoch: int, position: int) -> int:
        """The number of the row at a position of an epoch."""
        number, start = self._window_at(epoch, position)
        window = self._window(epoch, number)
        within = window.order[position - start]
        piece = bisect_right(window.ends, within)
        return window.firsts[piece] + within - (window.ends[piece - 1] if piece else 0)

    def upcoming(self, epoch: int, position: int) -> Sequence[int]:
        """The first row of each piece of the window."""
        return self._window(epoch, self._window_at(epoch, position)[0]).firsts

    def _window_at(self, epoch: int, position: int) -> tuple[int, int]:
        """The number of the window at a position, and the position of its first row."""
        ends = self._pieces(epoch)[1]
        number = bisect_right(ends, position)
        return number, ends[number - 1] if number else 0

    def _arranged(self, epoch: int) -> tuple[Permutation, tuple[int, ...]]:
        """The order of the pieces, and the position at which each window ends."""
        order = Permutation(len(self._sizes), f"pieces/{self._seed}/{epoch}")
        ends = tuple(accumulate(self._sizes[order[k]] for k in range(len(order))))
        return order, (*ends[PIECES_PER_WINDOW - 1 : -1 : PIECES_PER_WINDOW], ends[-1])

    def _make_window(self, epoch: int, number: int) -> _Window:
        order = self._pieces(epoch)[0]
        first = number * PIECES_PER_WINDOW
        pieces = [order[k] for k in range(first, min(first + PIECES_PER_WINDOW, len(order)))]
        ends = tuple(accumulate(self._sizes[piece] for piece in pieces))
        key = f"window/{self._seed}/{epoch}/{number}"
        return _Window(tuple(self._firsts[piece] for piece in pieces), ends, Permutation(ends[-1], key))
