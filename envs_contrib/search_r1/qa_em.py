"""The scores of Search-R1 (arXiv:2503.09516): exact match, F1 and format of a text with tags.

    <think>...</think><search>...</search><information>...</information><think>...</think><answer>...</answer>

The answer is the text of the last complete `<answer>`. Two texts match where the gym's `exact_match` takes
them for equal: in lower case, without ASCII punctuation, articles and further blanks (SQuAD,
arXiv:1606.05250), but for what distinguishes numbers, and for labels that would be empty. The published
function takes `-1.5` for `15`, and pays an empty answer where the label is `A`: that is `qa_em` here, and the
metric of that name.
The names of the scores are those of the published `qa_em` and `qa_em_format`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from agentrl import Task, UserError, exact_match
from agentrl.envs.graders import f1 as f1_of_task
from agentrl.tools import JSON

Metric = Literal["em", "f1", "qa_em"]

_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_VALID = re.compile(r"(?:think search information )*think answer ")


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, words separated by single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def em(answer: str, golden_answers: Sequence[str]) -> float:
    """1.0 where the answer equals one of the accepted answers by `exact_match`."""
    return max((exact_match(answer, gold) for gold in golden_answers), default=0.0)


def f1(answer: str, golden_answers: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words; of the best accepted answer."""
    labels: list[JSON] = [*golden_answers]
    return f1_of_task(Task.ask("f1", "", None, answers=labels), answer) if labels else 0.0


def published_em(answer: str, golden_answers: Sequence[str]) -> float:
    """1.0 where the answer equals one of the accepted answers after `normalized`, as in the published
    program: an empty answer equals `A`, and `-1.5` equals `15`."""
    return float(normalized(answer) in map(normalized, golden_answers))


_METRICS: Mapping[Metric, Callable[[str, Sequence[str]], float]] = {"em": em, "f1": f1, "qa_em": published_em}


def last_answer(text: str, *, at_least: int = 1) -> str | None:
    """The text of the last complete `<answer>`; None where there are fewer than `at_least`.

    Each begins at the first opening tag that follows the one before, and ends at the next closing tag.
    """
    answers = list(_answers(text))
    return answers[-1].strip() if len(answers) >= at_least else None


def is_valid_sequence(response: str) -> bool:
    """Whether a response consists of complete tags in their order: any number of think, search, information;
    then think, answer. Between tags only blanks are allowed."""
    blocks, end = "", 0
    opened: str | None = None
    for tag in _TAG.finditer(response):
        closes, name = tag[1] == "/", tag[2]
        if closes != (opened is not None) or (closes and name != opened):
            return False
        if not closes and response[end : tag.start()].strip():
            return False
        if closes:
            blocks += f"{name} "
        opened, end = None if closes else name, tag.end()
    return opened is None and not response[end:].strip() and _VALID.fullmatch(blocks) is not None


def is_retrieved(information: Sequence[str], golden_answers: Sequence[str]) -> bool:
    """Whether an accepted answer is part of what a search returned, both after `normalized`."""
    texts = [normalized(text) for text in information]
    wanted = [*filter(None, map(normalized, golden_answers))]
    return any(gold in text for gold in wanted for text in texts)


def qa_em(
    text: str, golden_answers: Sequence[str], *, format_score: float = 0.0, score: float = 1.0
) -> float:
    """The score of a prompt with its response: `score` for an exact match, `format_score` for another answer.

    The prompt shows `<answer>` in an example. So a text with fewer than two of them has no answer, and the
    score 0.
    """
    answer = last_answer(text, at_least=2)
    if answer is None:
        return 0.0
    return score if published_em(answer, golden_answers) else format_score


@dataclass(frozen=True, slots=True)
class Scoring:
    """The reward of a response. m: the value of `metric` (em, f1 or qa_em), 0 without an answer.

        valid sequence              max(m, structure_format_score + retrieval_score where it was retrieved)
        another one with an answer  max(m - structure_format_score, final_format_score)
        no answer                   0

    Raises:
        UserError: there is no such metric; a score is no number from 0 to 1, or the format would be worth
            more than a right answer.
    """

    metric: Metric = "em"
    structure_format_score: float = 0.0
    final_format_score: float = 0.0
    retrieval_score: float = 0.0

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise UserError(f"metric is {self.metric!r}; choose one of {', '.join(get_args(Metric))}.")
        for name in ("structure_format_score", "final_format_score", "retrieval_score"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise UserError(f"{name} is {value!r}; give a number from 0 to 1.")
        largest = max(self.retrieval_score, self.final_format_score)
        if self.structure_format_score + largest > 1:
            raise UserError(
                f"structure_format_score = {self.structure_format_score:g} with another score of {largest:g} "
                "is worth more than a right answer, which is 1; lower one of them."
            )

    @classmethod
    def of(cls, settings: Mapping[str, JSON]) -> Scoring:
        """The scoring of some settings by name.

        Raises:
            UserError: there is no such setting, or its value is wrong.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise UserError(f"scoring has no setting `{unknown[0]}`; it has {', '.join(known)}.")
        make: Callable[..., Scoring] = cls
        return make(**settings)

    def score(self, response: str, information: Sequence[str], golden_answers: Sequence[str]) -> float:
        """The reward of a response. information: what its searches returned."""
        answer = last_answer(response)
        value = 0.0 if answer is None else _METRICS[self.metric](answer, golden_answers)
        if is_valid_sequence(response):
            retrieved = bool(self.retrieval_score) and is_retrieved(information, golden_answers)
            return max(value, self.structure_format_score + self.retrieval_score * retrieved)
        return 0.0 if answer is None else max(value - self.structure_format_score, self.final_format_score)


def _answers(text: str) -> Iterator[str]:
    # Not a regular expression: with many opening tags and no closing one it would take quadratic time.
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        yield text[start + len(_OPEN) : end]
        start = text.find(_OPEN, end + len(_CLOSE))
