"""Worlds whose tasks are drawn from a seed, endlessly, by level, and never twice.

A hash of what a task asks and of its right outcome decides its split, so no two splits share a task, whatever
the seed: train on seed 0, 1, 2, ..., and the test split of any seed is held out.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

from agentrl import Message, Task, ToolEnv, UserError
from agentrl.tools import JSON

COUNTS: Mapping[str, int] = {"train": 600, "validation": 60, "test": 120}
"""The number of tasks of each split, for one seed."""
LEVELS = (1, 2, 3)
_SHARES: Mapping[str, int] = {"train": 60, "validation": 15, "test": 25}


class Draft(NamedTuple):
    """A task before it has an id: what is asked, the right outcome as text, what code needs to know."""

    prompt: str
    answer: str
    metadata: dict[str, JSON]


class SeededWorld(ToolEnv):
    """Tools over a world that is drawn from a seed, in three levels.

    seed: of all tasks. level: 1, 2 or 3, from easy to hard; None = all three, in turn.

    Raises:
        UserError: there is no such level.
    """

    splits = tuple(COUNTS)
    breakdown = "kind"
    draw: ClassVar[staticmethod[[random.Random, int], Draft]]
    """Makes a task of a level, whose metadata has its `kind`."""

    def __init__(self, seed: int = 0, level: int | None = None) -> None:
        super().__init__()
        if level is not None and level not in LEVELS:
            raise UserError(f"{type(self).__name__} has no level {level}; it has 1, 2 and 3.")
        self.seed, self.levels = seed, LEVELS if level is None else (level,)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split: train, validation or test.

        Raises:
            UserError: no such split.
        """
        if split not in COUNTS:
            raise UserError(f"{type(self).__name__} has no split `{split}`; it has {', '.join(COUNTS)}.")
        return _drawn(type(self), self.seed, self.levels, split)


def split_of(draft: Draft) -> str:
    """The split of a task, by its content."""
    place = zlib.crc32(f"{draft.prompt}\n{draft.answer}".encode()) % 100
    for split, share in _SHARES.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("the shares add up to 100")


def is_number(answer: str, result: str) -> bool:
    """Whether an answer is a number alone, and that one within a hundredth."""
    text = answer.strip().replace(",", "")
    return (
        bool(re.fullmatch(r"-?[0-9]{1,12}(\.[0-9]{1,12})?", text)) and abs(float(text) - float(result)) < 0.01
    )


@lru_cache(maxsize=32)
def _drawn(world: type[SeededWorld], seed: int, levels: tuple[int, ...], split: str) -> tuple[Task, ...]:
    rng = random.Random(f"{world.__name__} {seed} {levels} {split}")
    tasks: dict[tuple[str, str], Task] = {}
    while len(tasks) < COUNTS[split]:
        level = levels[len(tasks) % len(levels)]
        draft = world.draw(rng, level)
        if split_of(draft) == split:
            facts: dict[str, JSON] = {**draft.metadata, "level": level}
            prompt = (Message("user", draft.prompt),)
            task = Task(f"{split}-{len(tasks)}", prompt, draft.answer, facts, split)
            tasks.setdefault((draft.prompt, draft.answer), task)
    return tuple(tasks.values())
