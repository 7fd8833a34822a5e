"""The environment and its questions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

from agentrl import SingleTurnEnv, Task
from agentrl.tools import inline

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LETTERS = "ABCD"
LONGEST = 365
"""The greatest distance in a question, in days."""
NUM_QUESTIONS: Mapping[str, int] = {"train": 4000, "test": 1000}


class CalendarQuestions(SingleTurnEnv):
    """Which weekday it is, or was, so many days away: four choices, one letter.

    Guessing a letter is right one time in four. No pair of day and distance is in two splits.
    """

    chance_score = 1 / len(LETTERS)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        """The questions of a split."""
        return _questions(self.seed)[split]

    @inline
    def grade(self, task: Task, answer: str) -> float:
        """1.0 for the right letter, as `B`, `b`, `(B)` or `B.`."""
        return float(answer.strip().strip("().").upper() == task.answer)


@lru_cache(maxsize=8)
def _questions(seed: int) -> Mapping[str, tuple[Task, ...]]:
    rng = random.Random(seed)
    pairs = [*product(range(len(DAYS)), (*range(-LONGEST, -1), *range(2, LONGEST + 1)))]
    rng.shuffle(pairs)
    rest = iter(pairs)
    return {
        split: tuple(_task(f"{split}-{number}", split, *next(rest), rng) for number in range(count))
        for split, count in NUM_QUESTIONS.items()
    }


def _task(id: str, split: str, today: int, days: int, rng: random.Random) -> Task:
    right = DAYS[(today + days) % len(DAYS)]
    choices = rng.sample([day for day in DAYS if day != right], len(LETTERS) - 1)
    place = rng.randrange(len(LETTERS))
    choices.insert(place, right)
    when = f"will it be in {days} days" if days > 0 else f"was it {-days} days ago"
    listed = "\n".join(f"{letter}) {day}" for letter, day in zip(LETTERS, choices, strict=True))
    question = f"Today is {DAYS[today]}. Which day {when}? Answer with one letter.\n{listed}"
    plain = Task.ask(id, question, LETTERS[place], today=DAYS[today], days=days)
    return Task(plain.id, plain.prompt, plain.answer, plain.metadata, split)
