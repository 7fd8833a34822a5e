"""The normal form in which an answer and a label are compared word by word."""

from __future__ import annotations

import re
import string

from agentrl.errors import GradingError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MINUS, _SEPARATOR = "\N{MINUS SIGN}", "\N{MIDDLE DOT}"
_SIGN = re.compile(r"(?<![\w.)\]}])-(?=\\?[$€£]?\.?\d)", re.ASCII)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_SEPARATED = re.compile(rf"(?<=\d)[{re.escape(string.punctuation)}](?=\d)", re.ASCII)
_LEADING_POINT = re.compile(r"(?<![\w.])\.(?=\d)", re.ASCII)

NO_LABEL = (
    "the task has no label to grade by; give each an answer (in files of prompts, label_key names its column)"
)


def squad_normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD, arXiv:1606.05250)."""
    return _joined(_ARTICLES.sub(" ", _bare(text)))


def normal_forms(answer: str, gold: str) -> tuple[str, str]:
    """An answer and a label in the normal form in which they are compared; the label's is not empty.

    It is that of `squad_normalize`, which alone would make one text of `-1.5` and `15`, and nothing of `A`
    and `+`: the signs and separators of numbers stay, articles stay where the label has no other words, and
    punctuation where it has nothing else.

    Raises:
        GradingError: the label is empty.
    """
    answer, gold = _with_numbers(answer), _with_numbers(gold)
    for normal in (squad_normalize, _bare, str.lower):
        if expected := _joined(normal(gold)):
            return _joined(normal(answer)), expected
    raise GradingError("invalid", NO_LABEL)


def exact_match(answer: str, gold: str | None) -> float:
    """1.0 where answer and label are the same in their normal form (`normal_forms`), else 0.0.

    Raises:
        GradingError: there is no label, or an empty one.
    """
    answer, expected = normal_forms(answer, gold or "")
    return float(answer == expected)


def _bare(text: str) -> str:
    return text.lower().translate(_PUNCTUATION)


def _joined(text: str) -> str:
    return " ".join(text.split())


def _with_numbers(text: str) -> str:
    """The text with marks in its numbers that are no ASCII punctuation: `-1,000.5` becomes `−1000·5`."""
    text = _SIGN.sub(_MINUS, _THOUSANDS.sub("", text))
    return _LEADING_POINT.sub(f"0{_SEPARATOR}", _SEPARATED.sub(_SEPARATOR, text))
