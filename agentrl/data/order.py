"""Shuffled orders as functions: the place of a row is computed, and nothing of the length of a file is kept.

    Permutation(n, key)[position]     one shuffled order of n things
    Shuffled, Windowed, InOrder       the row of a position in an epoch

Rows that can be read one by one are shuffled as a whole. A Parquet file is read in stretches (pieces of its
row groups). There an epoch goes through all pieces in a shuffled order, some at a time: a window. The rows of
a window are shuffled. So a batch mixes rows of several places of the file, and memory holds one window.
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

    A few numbers are shuffled in a list. Many are placed by a Feistel network on a grid of a x b cells, the
    smallest that holds n: row and column are moved in turns, each by a hash of the other. A place beyond n
    goes through again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
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
        """What stands at a position.

        Raises:
            IndexError: there is no such position.
        """
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} of {self._n}")
        if self._listed is not None:
            return self._listed[position]
        place = self._moved(position)
        while place >= self._n:
            place = self._moved(place)
        return place

    def _moved(self, place: int) -> int:
        row, column = divmod(place, self._width)
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
    """Which row comes at which position of which epoch."""

    @abstractmethod
    def row(self, epoch: int, position: int) -> int:
        """The row."""

    def soon(self, epoch: int, position: int) -> Sequence[int]:
        """A row of each piece that the next positions read, where that helps."""
        del epoch, position
        return ()


class InOrder(Order):
    """The rows as they are."""

    def row(self, epoch: int, position: int) -> int:
        """The same number."""
        del epoch
        return position


class Shuffled(Order):
    """All rows, in another order for every epoch."""

    def __init__(self, n: int, seed: int) -> None:
        self._permutation = lru_cache(maxsize=2)(lambda epoch: Permutation(n, f"order/{seed}/{epoch}"))

    def row(self, epoch: int, position: int) -> int:
        """The row."""
        return self._permutation(epoch)[position]


class _Window(NamedTuple):
    """firsts: the first row of each piece. ends: how many rows of the window end with it."""

    firsts: tuple[int, ...]
    ends: tuple[int, ...]
    order: Permutation


class Windowed(Order):
    """Pieces in a shuffled order, `PIECES_PER_WINDOW` at a time; of these all rows, in a shuffled order.

    sizes: rows of each piece, in the order of the file.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes = tuple(sizes)
        self._firsts = (0, *accumulate(self._sizes))
        self._seed = seed
        self._pieces = lru_cache(maxsize=2)(self._arranged)
        self._window = lru_cache(maxsize=4)(self._opened)

    def row(self, epoch: int, position: int) -> int:
        """The row."""
        number, start = self._place(epoch, position)
        window = self._window(epoch, number)
        within = window.order[position - start]
        piece = bisect_right(window.ends, within)
        return window.firsts[piece] + within - (window.ends[piece - 1] if piece else 0)

    def soon(self, epoch: int, position: int) -> Sequence[int]:
        """A row of each piece of the window."""
        return self._window(epoch, self._place(epoch, position)[0]).firsts

    def _place(self, epoch: int, position: int) -> tuple[int, int]:
        """The window of a position, and the position at which it begins."""
        ends = self._pieces(epoch)[1]
        number = bisect_right(ends, position)
        return number, ends[number - 1] if number else 0

    def _arranged(self, epoch: int) -> tuple[Permutation, tuple[int, ...]]:
        """The order of the pieces, and the position at which each window ends."""
        order = Permutation(len(self._sizes), f"pieces/{self._seed}/{epoch}")
        ends = tuple(accumulate(self._sizes[order[k]] for k in range(len(order))))
        return order, (*ends[PIECES_PER_WINDOW - 1 : -1 : PIECES_PER_WINDOW], ends[-1])

    def _opened(self, epoch: int, number: int) -> _Window:
        order = self._pieces(epoch)[0]
        first = number * PIECES_PER_WINDOW
        pieces = [order[k] for k in range(first, min(first + PIECES_PER_WINDOW, len(order)))]
        ends = tuple(accumulate(self._sizes[piece] for piece in pieces))
        key = f"window/{self._seed}/{epoch}/{number}"
        return _Window(tuple(self._firsts[piece] for piece in pieces), ends, Permutation(ends[-1], key))
