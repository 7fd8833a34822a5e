"""Built-in reward functions of an answer and its label, for environments with a `reward` setting.

    exact_match   1 where answer and label are equal in lower case, without punctuation and articles
    f1            harmonic mean of precision and recall of the words that both share
    number        1 where the last number of the answer equals the last one of the label
    choice        1 where the answer begins with the label's letter: `B`, `(b)`, `B. Because ...`

Where a task has several answers (`metadata["answers"]`), the best of them counts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal

from agentrl.envs.scoring import Grade, squad_normalize
from agentrl.envs.scoring import exact_match as _is_equal
from agentrl.tools import inline
from agentrl.types import Task

AnswerReward = Callable[[Task, str], Grade | Awaitable[Grade]]
"""The reward of an answer to a task, sync or async."""

_NUMBER = re.compile(
    r"(?:(?<![\w.])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII
)
_CHOICE = re.compile(r"[\s(\[*]*([A-Za-z0-9])(?![A-Za-z0-9])")


@inline
def exact_match(task: Task, answer: str) -> float:
    """1.0 where answer and label are equal after `squad_normalize`."""
    return _best(task, lambda gold: _is_equal(answer, gold))


@inline
def f1(task: Task, answer: str) -> float:
    """The F1 of words after `squad_normalize` (SQuAD, arXiv:1606.05250)."""
    return _best(task, lambda gold: _f1(answer, gold))


@inline
def number(task: Task, answer: str) -> float:
    """1.0 where the last numbers are equal, as `1,000` and `1000.0` are, in any text."""
    last = _last_number(answer)
    return _best(task, lambda gold: float(last is not None and last == _last_number(gold)))


@inline
def choice(task: Task, answer: str) -> float:
    """1.0 where the answer begins with the letter, or the digit, that the label begins with."""
    letter = _letter(answer)
    return _best(task, lambda gold: float(letter is not None and letter == _letter(gold)))


REWARDS: Mapping[str, AnswerReward] = {
    "exact_match": exact_match,
    "f1": f1,
    "number": number,
    "choice": choice,
}
"""Rewards by name."""


def _best(task: Task, grade: Callable[[str], float]) -> float:
    """The maximum of the grade over all answers of the task; 0.0 without answers."""
    alternatives = task.metadata.get("answers")
    answers = alternatives if isinstance(alternatives, list) else [task.answer]
    return max((grade(gold) for gold in answers if isinstance(gold, str)), default=0.0)


def _f1(answer: str, gold: str) -> float:
    predicted, expected = squad_normalize(answer).split(), squad_normalize(gold).split()
    if not (predicted and expected):
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _letter(text: str) -> str | None:
    match = _CHOICE.match(text)
    return match[1].lower() if match else None
