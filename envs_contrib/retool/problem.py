"""A problem, its draft, and the type of the functions that draw one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

Level = Literal["easy", "medium", "hard"]
LEVELS: tuple[Level, ...] = get_args(Level)


class Draft(NamedTuple):
    """A question with one integer as its answer.

    answer: computes it, in another way than the cells. cells: the programs that solve it, one after another
    in one interpreter; the output of the last one is the answer.
    """

    kind: str
    text: str
    answer: Callable[[], int]
    cells: tuple[str, ...]


class Problem(NamedTuple):
    """A draft whose answer has been computed."""

    kind: str
    text: str
    answer: int
    cells: tuple[str, ...]


Maker = Callable[[random.Random], Draft]
