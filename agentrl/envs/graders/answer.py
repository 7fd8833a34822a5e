"""What graders read of a task and of a model's answer. Every function is linear in the answer's length."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from agentrl.envs.normal_form import NO_LABEL
from agentrl.errors import GradingError
from agentrl.types import Task

ExpertAnswers: TypeAlias = Callable[[Task], str | None]
"""From a task to an answer of full marks; None where no label of the task makes one."""

MAX_CHARS = 100_000
"""Characters of an answer that a grader reads, counted from its end."""

_THINK_END = "</think>"
_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


ANSWERS = "answers"
"""The key of a task's metadata with several labels, each of them right."""


def answers_of(task: Task) -> list[str]:
    """The labels of a task, each of them right: `metadata["answers"]`, else its answer; no empty ones."""
    alternatives = task.metadata.get(ANSWERS)
    answers = alternatives if isinstance(alternatives, list) and alternatives else [task.answer]
    return [gold for gold in answers if isinstance(gold, str) and gold.strip()]


def labels_of(task: Task) -> list[str]:
    """`answers_of` a task that is graded.

    Raises:
        GradingError: it has none, so that nothing can be said of an answer.
    """
    if labels := answers_of(task):
        return labels
    raise GradingError("invalid", f"{task.id}: {NO_LABEL}")


def best(task: Task, grade: Callable[[str], float]) -> float:
    """The maximum of the grade over all labels of the task.

    Raises:
        GradingError: it has none.
    """
    return max(map(grade, labels_of(task)))


def tail(answer: str) -> str:
    """The last `MAX_CHARS` characters of an answer."""
    return answer[-MAX_CHARS:]


def after_thinking(answer: str) -> str | None:
    """What follows the last `</think>`; None without one."""
    _, end, final = answer.rpartition(_THINK_END)
    return final if end else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`; None without one, or where its braces are open.

    The last one is the one that begins last, as in the reference of MATH (arXiv:2103.03874): of a box in a
    box it is the inner one. An answer that ends within its last box is unfinished, and no earlier box counts.
    Escaped braces do not count. Only the last `MAX_CHARS` characters are read.
    """
    text = tail(text)
    opened: list[int] = []  # where the content of a box begins; -1 for other braces
    begin, end = -1, -1
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "{":
            opened.append(-1)
        elif token == "}":
            start = opened.pop() if opened else -1
            if start >= 0 and start == begin:
                end = match.start()
        elif token not in ("\\{", "\\}"):
            opened.append(match.end())
            begin, end = match.end(), -1
    return None if end < 0 else text[begin:end]
