"""Graders that compare the text of an answer with the label.

Where a task has several answers (`metadata["answers"]`), the best of them counts. Of an answer only the last
100,000 characters are read.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import TypeVar

from agentrl.envs.graders.answer import (
    ExpertAnswers,
    after_thinking,
    answers_of,
    best,
    labels_of,
    last_boxed,
    tail,
)
from agentrl.envs.normal_form import exact_match as _is_equal
from agentrl.envs.normal_form import normal_forms
from agentrl.errors import GradingError
from agentrl.tools import inline
from agentrl.types import RewardParts, Task

_T = TypeVar("_T")

_THOUSANDS = r"(?:,\\!|,|\{,\}|\\[,!;: ]|[_\u00a0\u2009\u202f])"
"""What stands between groups of three digits: in prose, in LaTeX, in programs, as a narrow space."""
_SIGN, _CURRENCY = r"(?<![\w.)\]}])[-+\u2212\u2013\uff0d]", r"(?:\\?[$\u00a3\u20ac])?"
_NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN}){_CURRENCY})?"
    rf"(?P<digits>(?:\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{{1,3}})?",
    re.ASCII,
)
_FINAL = re.compile(r"####[\s*]*(?=(?:\\(?:boxed|fbox|text)\{|[^\w\s]){0,4}\d)(?!\d+[.)]\s+[A-Za-z])")
"""The mark of GSM8K before a number; not a heading of Markdown, `#### 2. Add them up`."""
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
    """1.0 where answer and label are equal in lower case, without punctuation and articles (SQuAD,
    arXiv:1606.05250), but for those that distinguish numbers, or that are all of the label."""
    answer = tail(answer)
    return best(task, lambda gold: _is_equal(answer, gold))


@inline
def f1(task: Task, answer: str) -> float:
    """The F1 of words, normalised as for `exact_match`, 0.0 to 1.0."""
    answer = tail(answer)
    return best(task, lambda gold: _f1(*map(str.split, normal_forms(answer, gold))))


@inline
def number(task: Task, answer: str) -> float:
    """1.0 where the last number of the answer equals the last one of the label, as `1,000` and `1000.0`.

    Of a text with `####`, it is the number after the last of these (GSM8K, arXiv:2110.14168).
    """
    return float(_last_number(tail(answer)) in _labels(task, _last_number, "number"))


@inline
def choice(task: Task, answer: str) -> float:
    """1.0 where the answer begins with the letter, or the digit, that the label begins with."""
    return float(_first_letter(answer) in _labels(task, _first_letter, "letter or digit at the start"))


@inline
def gpqa(task: Task, answer: str) -> float:
    """1.0 where the answer chooses the label's letter, in any form that models write.

    The label is a letter, or the text of one of `metadata["choices"]`. Only what follows the last `</think>`
    is read. The first of these forms that the answer has decides, and of that form the last one: a letter in
    a box, `Answer: C` or `the answer is (C)`, `(C)`, a line of one letter, a letter at the start
    (`C. Because`), the text of one choice.
    """
    choices = _choices_of(task)
    letters = _letters_of(choices)
    answer = tail(answer)
    final = after_thinking(answer)
    chosen = _chosen_letter(answer if final is None else final, letters, choices)
    return float(chosen in _labels(task, partial(_label_letter, letters=letters, choices=choices), "choice"))


@inline
def dapo(task: Task, answer: str) -> RewardParts:
    """+1.0 where the last `Answer:` line equals the label, else -1.0 (DAPO, arXiv:2503.14476).

    Only the last 300 characters are read. Both sides are normalised as in Minerva (arXiv:2206.14858, appendix
    D): what follows the last `=`, without units, text commands, dollar signs and thousands separators. The
    part `right` is 1 or 0.
    """
    found = _DAPO_ANSWER.findall(answer[-_DAPO_CHARS:])
    right = best(task, lambda gold: float(bool(found) and _is_dapo(found[-1], gold)))
    return RewardParts({"right": right}, total=2.0 * right - 1.0)


def _labels(task: Task, read: Callable[[str], _T | None], what: str) -> list[_T]:
    """What a grader reads in the labels of a task.

    Raises:
        GradingError: no label has it, so that no answer could be right.
    """
    labels = labels_of(task)
    if found := [value for value in map(read, labels) if value is not None]:
        return found
    raise GradingError("invalid", f"{task.id}: the label {labels[0][:80]!r} has no {what}")


def _choices_of(task: Task) -> list[str]:
    listed = task.metadata.get("choices")
    return [str(text) for text in listed] if isinstance(listed, list) else []


def _letters_of(choices: list[str]) -> str:
    return _LETTERS[: len(choices)] if choices else _LETTERS


def _f1(predicted: list[str], expected: list[str]) -> float:
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


def _last_number(text: str) -> Decimal | None:
    marks = [*_FINAL.finditer(text)]
    numbers = [*_NUMBER.finditer(text)] if not marks else [_NUMBER.search(text, marks[-1].end())]
    return _value(numbers[-1]) if numbers else None


def _value(number: re.Match[str] | None) -> Decimal | None:
    if number is None:
        return None
    sign = "" if number["sign"] in (None, "+") else "-"
    digits = re.sub(r"[^\d.]", "", number["digits"])
    return Decimal(f"{sign}{digits}{number['exponent'] or ''}")


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
    """The letter of the only choice with this text."""
    lettered = zip(_LETTERS, choices, strict=False)
    same = [letter for letter, choice in lettered if choice.strip() and _is_equal(text, choice)]
    return same[0] if len(same) == 1 else None


def _label_letter(gold: str, letters: str, choices: list[str]) -> str | None:
    return _choice_with_text(gold, choices) or _allowed(_CHOICE.match(gold), letters)


def _is_dapo(answer: str, gold: str) -> bool:
    expected = _dapo_normal(gold)
    # Of `km` nothing would be left, and an empty line would be as good.
    return _dapo_normal(answer) == expected if expected else answer.strip() == gold.strip()


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
        try:
            return next((candidate for candidate in candidates if grade(task, candidate) == 1.0), None)
        except GradingError:
            return None

    return answer


@inline
def random(task: Task, answer: str) -> float:
    """0.0 or 1.0 with equal odds, whatever the label says; for the same task and answer always the same.

    What a policy still learns from it is a matter of the estimator and the model (arXiv:2506.10947).
    """
    content = f"{task.id}\n{answer}".encode("utf-8", "surrogatepass")
    return float(hashlib.sha256(content).digest()[0] & 1)


def _label(task: Task, gold: str) -> str:
    del task
    return gold


def _letter_of(task: Task, gold: str) -> str:
    choices = _choices_of(task)
    return f"Answer: {_label_letter(gold, _letters_of(choices), choices)}"


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
    "random": random,
}
"""Graders without settings, by name."""

TEXT_ANSWERS: Mapping[Callable[[Task, str], float], ExpertAnswers | None] = {
    **{grade: _full_marks(grade, _label) for grade in (exact_match, f1, number, choice)},
    gpqa: _full_marks(gpqa, _letter_of),
    dapo: _full_marks(dapo, _dapo_line),
    random: None,
}
"""The answers of an expert, by grader; None = it has none."""
