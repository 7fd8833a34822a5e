"""Seeded problems that code solves faster than thought, in three difficulties.

    easy      remainders and digit sums of powers, one of them or two in a row: short programs
    medium    number theory by search: primes, congruences, recurrences, Collatz, digits, divisors
    hard      counting and optimisation by dynamic programming

Every problem has one integer as its answer, which is no number of its text. The answer is computed here in
another way than by the cells of the expert, which run in the sandbox: with closed formulas, sieves, or a
recurrence in another order. A hash of its text decides the split of a problem, so no two splits share one.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping
from functools import lru_cache

from envs_contrib.retool import easy, hard, medium
from envs_contrib.retool.problem import Level, Maker, Problem

MAKERS: Mapping[Level, tuple[Maker, ...]] = {
    "easy": easy.MAKERS,
    "medium": medium.MAKERS,
    "hard": hard.MAKERS,
}
NUM_PROBLEMS: Mapping[str, Mapping[Level, int]] = {
    "demo": {"easy": 8000, "medium": 400, "hard": 200},
    "train": {"easy": 6000, "medium": 900, "hard": 600},
    "validation": {"easy": 512, "medium": 60, "hard": 60},
    "test": {"easy": 1024, "medium": 120, "hard": 120},
}
"""The number of problems of each split and level."""
_SHARES: Mapping[str, int] = {"demo": 45, "train": 40, "validation": 5, "test": 10}


def split_of(text: str) -> str:
    """The split of the problem with this text."""
    place = zlib.crc32(text.encode()) % 100
    for split, share in _SHARES.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("the shares add up to 100")


@lru_cache(maxsize=64)
def problems(seed: int, level: Level, split: str) -> tuple[Problem, ...]:
    """The problems of a level in a split, no two with the same text, each kind equally often.

    Raises:
        KeyError: no such level or split.
    """
    rng = random.Random(f"{seed} {level} {split}")
    makers = MAKERS[level]
    by_text: dict[str, Problem] = {}
    while len(by_text) < NUM_PROBLEMS[split][level]:
        draft = makers[len(by_text) % len(makers)](rng)
        if split_of(draft.text) != split:
            continue
        problem = Problem(draft.kind, draft.text, draft.answer(), draft.cells)
        if not _is_trivial(problem):
            by_text.setdefault(problem.text, problem)
    return tuple(by_text.values())


def _is_trivial(problem: Problem) -> bool:
    """Whether the answer is 0, 1 or a number of the question, which a guess would find."""
    return problem.answer < 2 or str(problem.answer) in re.findall(r"\d+", problem.text)
