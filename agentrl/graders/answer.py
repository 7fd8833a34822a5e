"""What graders read of a task and of a model's answer. Every function is linear in the answer's length."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from agentrl.types import Task

ExpertAnswers: TypeAlias = Callable[[Task], str | None]
"""From a task to an answer of full marks; None where no label of the task makes one."""

MAX_CHARS = 100_000
"""Characters of an answer that a grader reads, counted from its end."""

_THINK_END = "</think>"
_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")


def answers_of(task: Task) -> list[str]:
    """The labels of a task, each of them right: `metadata["answers"]`, else its answer, if any."""
    alternatives = task.metadata.get("answers")
    answers = alternatives if isinstance(alternatives, list) else [task.answer]
    return [gold for gold in answers if isinstance(gold, str)]


def best(task: Task, grade: Callable[[str], float]) -> float:
    """The maximum of the grade over all labels of the task; 0.0 without labels."""
    return max(map(grade, answers_of(task)), default=0.0)


def tail(answer: str) -> str:
    """The last `MAX_CHARS` characters of an answer."""
    return answer[-MAX_CHARS:]


def after_thinking(answer: str) -> str | None:
    """What follows the last `</think>`; None without one."""
    _, end, final = answer.rpartition(_THINK_END)
    return final if end else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}` whose braces are balanced; None without one.

    Of a box in a box it is the inner one. Escaped braces do not count. Only the last `MAX_CHARS`
    characters are read.
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
            if start > begin:
                begin, end = start, match.start()
        elif token not in ("\\{", "\\}"):
            opened.append(match.end())
    return None if begin < 0 else text[begin:end]
