"""Graders that compare the text of an answer with the label.

Where a task has several answers (`metadata["answers"]`), the best of them counts. Of an answer only the last
100,000 characters are read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal

from agentrl.envs.scoring import exact_match as _is_equal
from agentrl.envs.scoring import squad_normalize
from agentrl.graders.answer import ExpertAnswers, after_thinking, answers_of, best, last_boxed, tail
from agentrl.tools import inline
from agentrl.types import RewardParts, Task

_NUMBER = re.compile(
    r"(?:(?<![\w.])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?", re.ASCII
)
_CHOICE = re.compile(r"[\s(\[*]*([A-Za-z0-9])(?![A-Za-z0-9])")
_MAX_CHOICE_CHARS = 1000

_LETTERS = "ABCDEFGHIJ"
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b")
_STATED = re.compile(
    r"\b(?i:answer|option|choice)(?i: (?:is|was|would be|should be))? ?[:=]? ?[*_`\"'$]* ?"
    r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?[(\[]?([A-J])(?![\w'])"
)
_IN_PARENTHESES = re.compile(r"\(([A-Ja-j])\)")
_OWN_LINE = re.compile(r"^[ \t*_(\[]*([A-J])[ \t*_)\].:]*$", re.MULTILINE)
_AT_START = re.compile(r"[\s*_(\[]*([A-J])[*_)\].:]")

_DAPO_CHARS = 300
_DAPO_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_DAPO_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_DAPO_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents "
    "degrees cm gm pounds meters meals edges students childrentickets multiples"
)
_DAPO_MARKS = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_DAPO_REMOVED = (*_DAPO_UNITS.split(), *_DAPO_MARKS)
_DAPO_PATTERNS = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@inline
def exact_match(task: Task, answer: str) -> float:
    """1.0 where answer and label are equal in lower case, without punctuation and articles."""
    answer = tail(answer)
    return best(task, lambda gold: _is_equal(answer, gold))


@inline
def f1(task: Task, answer: str) -> float:
    """The F1 of words after `squad_normalize`, 0.0 to 1.0 (SQuAD, arXiv:1606.05250)."""
    words = squad_normalize(tail(answer)).split()
    return best(task, lambda gold: _f1(words, squad_normalize(gold).split()))


@inline
def number(task: Task, answer: str) -> float:
    """1.0 where the last number of the answer equals the last one of the label, as `1,000` and `1000.0`."""
    last = _last_number(tail(answer))
    return best(task, lambda gold: float(last is not None and last == _last_number(gold)))


@inline
def choice(task: Task, answer: str) -> float:
    """1.0 where the answer begins with the letter, or the digit, that the label begins with."""
    letter = _first_letter(answer)
    return best(task, lambda gold: float(letter is not None and letter == _first_letter(gold)))


@inline
def gpqa(task: Task, answer: str) -> float:
    """1.0 where the answer chooses the label's letter, in any form that models write.

    The label is a letter, or the text of one of `metadata["choices"]`. Only what follows the last `</think>`
    is read. The first of these forms that the answer has decides, and of that form the last one: a letter in
    a box, `Answer: C` or `the answer is (C)`, `(C)`, a line of one letter, a letter at the start
    (`C. Because`), the text of one choice.
    """
    choices = _choices_of(task)
    letters = _LETTERS[: len(choices)] if choices else _LETTERS
    answer = tail(answer)
    final = after_thinking(answer)
    chosen = _chosen_letter(answer if final is None else final, letters, choices)
    return best(task, lambda gold: float(chosen is not None and chosen == _label_letter(gold, choices)))


@inline
def dapo(task: Task, answer: str) -> RewardParts:
    """+1.0 where the last `Answer:` line equals the label, else -1.0 (DAPO, arXiv:2503.14476).

    Only the last 300 characters are read. Both sides are normalised as in Minerva (arXiv:2206.14858, appendix
    D): what follows the last `=`, without units, text commands, dollar signs and thousands separators. The
    part `right` is 1 or 0.
    """
    found = _DAPO_ANSWER.findall(answer[-_DAPO_CHARS:])
    normal = _dapo_normal(found[-1]) if found else None
    right = best(task, lambda gold: float(normal == _dapo_normal(gold)))
    return RewardParts({"right": right}, total=2.0 * right - 1.0)


def _choices_of(task: Task) -> list[str]:
    listed = task.metadata.get("choices")
    return [squad_normalize(str(text)) for text in listed] if isinstance(listed, list) else []


def _f1(predicted: list[str], expected: list[str]) -> float:
    if not (predicted and expected):
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _first_letter(text: str) -> str | None:
    match = _CHOICE.match(text[:_MAX_CHOICE_CHARS])
    return match[1].lower() if match else None


def _chosen_letter(text: str, letters: str, choices: list[str]) -> str | None:
    boxed = last_boxed(text)
    if boxed is not None:
        bare = _TEXT_COMMAND.sub("", boxed).replace("{", "").replace("}", "")
        return _allowed(_CHOICE.match(bare), letters) or _choice_with_text(bare, choices)
    one_line = " ".join(text.split())
    searches = ((_STATED, one_line), (_IN_PARENTHESES, one_line), (_OWN_LINE, text))
    for pattern, searched in searches:
        for letter in reversed(pattern.findall(searched)):
            if letter.upper() in letters:
                return str(letter).upper()
    return _allowed(_AT_START.match(text), letters) or _choice_with_text(text, choices)


def _allowed(match: re.Match[str] | None, letters: str) -> str | None:
    letter = match[1].upper() if match else ""
    return letter if letter and letter in letters else None


def _choice_with_text(text: str, choices: list[str]) -> str | None:
    normal = squad_normalize(text)
    return _LETTERS[choices.index(normal)] if normal in choices[: len(_LETTERS)] else None


def _label_letter(gold: str, choices: list[str]) -> str | None:
    by_text = _choice_with_text(gold, choices)
    match = _CHOICE.match(gold)
    return by_text or (match[1].upper() if match else None)


def _dapo_normal(text: str) -> str:
    text = text.rpartition("=")[2]
    for before, after in _DAPO_REPLACED:
        text = text.replace(before, after)
    for expression in _DAPO_REMOVED:
        text = text.replace(expression, "")
    for pattern, kept in _DAPO_PATTERNS:
        text = pattern.sub(kept, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


def _full_marks(grade: Callable[[Task, str], float], form: Callable[[Task, str], str]) -> ExpertAnswers:
    def answer(task: Task) -> str | None:
        candidates = (form(task, gold) for gold in answers_of(task))
        return next((candidate for candidate in candidates if grade(task, candidate) == 1.0), None)

    return answer


def _label(task: Task, gold: str) -> str:
    del task
    return gold


def _letter_of(task: Task, gold: str) -> str:
    return f"Answer: {_label_letter(gold, _choices_of(task))}"


def _dapo_line(task: Task, gold: str) -> str:
    del task
    return f"Answer: {gold}"


TEXT_GRADERS: Mapping[str, Callable[[Task, str], float]] = {
    "exact_match": exact_match,
    "f1": f1,
    "number": number,
    "choice": choice,
    "gpqa": gpqa,
    "dapo": dapo,
}
"""Graders without settings, by name."""

TEXT_ANSWERS: Mapping[Callable[[Task, str], float], ExpertAnswers] = {
    **{grade: _full_marks(grade, _label) for grade in (exact_match, f1, number, choice)},
    gpqa: _full_marks(gpqa, _letter_of),
    dapo: _full_marks(dapo, _dapo_line),
}
"""The answers of an expert, by grader."""
