"""Seeded word problems: a first amount, then one to three operations on it.

    Ann has 12 pens. Ben has 7 times as many. Ben sells 15. How many pens does Ben have?

is `12*7` = 84, then `84-15` = 69. A hash of its arithmetic decides the split of a problem, so
no two splits share a problem, whatever its wording and the seed.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

NUM_PROBLEMS: Mapping[str, int] = {"demo": 12_000, "train": 9_000, "validation": 800, "test": 2_080}
"""The number of problems of each split."""
MAX_STEPS = 3
MAX_AMOUNT = 999

OPERATORS = "+-*/"
_SHARES: Mapping[str, int] = {"demo": 45, "train": 40, "validation": 5, "test": 10}
_NAMES = ("Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gus", "Hana")
_NOUNS = ("pens", "eggs", "books", "shells", "coins", "cards", "apples", "stamps")
_EVENTS: Mapping[str, tuple[str, ...]] = {
    "+": ("{name} buys {n} more.", "{name} finds {n} more.", "{name} gets {n} more."),
    "-": ("{name} sells {n}.", "{name} loses {n}.", "{name} gives away {n}."),
    "*": ("{other} has {n} times as many.",),
    "/": ("{name} keeps one of {n} equal shares.",),
}


class Operation(NamedTuple):
    """An operation: an operator and its right-hand number."""

    operator: str
    number: int

    def __call__(self, amount: int) -> int:
        """The amount after the operation."""
        results = {"+": amount + self.number, "-": amount - self.number, "*": amount * self.number}
        return results[self.operator] if self.operator in results else amount // self.number


class Problem(NamedTuple):
    """text: the question for the result of `operations`, applied to `start` in their order."""

    text: str
    start: int
    operations: tuple[Operation, ...]

    @property
    def answer(self) -> int:
        """The amount after all operations."""
        amount = self.start
        for operation in self.operations:
            amount = operation(amount)
        return amount


def split_of(start: int, operations: tuple[Operation, ...]) -> str:
    """The split of this arithmetic."""
    key = f"{start}" + "".join(f"{operator}{number}" for operator, number in operations)
    place = zlib.crc32(key.encode()) % 100
    for split, share in _SHARES.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("the shares add up to 100")


@lru_cache(maxsize=32)
def problems(seed: int, split: str) -> tuple[Problem, ...]:
    """The problems of a split: no two with the same words, a third each of one, two and three steps.

    Raises:
        KeyError: no such split.
    """
    rng = random.Random(f"{seed} {split}")
    by_text: dict[str, Problem] = {}
    while len(by_text) < NUM_PROBLEMS[split]:
        start, operations = _draw(rng, num_steps=len(by_text) % MAX_STEPS + 1)
        if split_of(start, operations) != split:
            continue
        problem = Problem(_text(start, operations, rng), start, operations)
        if problem.answer not in (start, *(operation.number for operation in operations)):
            by_text.setdefault(problem.text, problem)
    return tuple(by_text.values())


def _draw(rng: random.Random, num_steps: int) -> tuple[int, tuple[Operation, ...]]:
    start = amount = rng.randint(2, 99)
    operations: list[Operation] = []
    for _ in range(num_steps):
        operations.append(_next_operation(amount, rng))
        amount = operations[-1](amount)
    return start, tuple(operations)


def _next_operation(amount: int, rng: random.Random) -> Operation:
    shares = [number for number in range(2, 10) if amount % number == 0 and amount // number >= 2]
    choices = {
        "+": range(2, min(99, MAX_AMOUNT - amount) + 1),
        "-": range(2, min(99, amount - 2) + 1),
        "*": range(2, min(9, MAX_AMOUNT // amount) + 1),
        "/": shares,
    }
    possible = [operator for operator in OPERATORS if choices[operator]]
    operator = rng.choice(possible)
    return Operation(operator, rng.choice(choices[operator]))


def _text(start: int, operations: tuple[Operation, ...], rng: random.Random) -> str:
    names = iter(rng.sample(_NAMES, 1 + MAX_STEPS))
    name, noun = next(names), rng.choice(_NOUNS)
    sentences = [f"{name} has {start} {noun}."]
    for operator, number in operations:
        event = rng.choice(_EVENTS[operator])
        other = next(names) if "{other}" in event else name
        sentences.append(event.format(name=name, other=other, n=number))
        name = other
    return " ".join([*sentences, f"How many {noun} does {name} have?"])
