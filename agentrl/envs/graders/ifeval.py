"""Instructions that a program can verify, with the names and arguments of IFEval (arXiv:2311.07911).

A check is a function of the answer and the instruction's arguments. All of them are linear in the length of
the answer: it is a model's, so no pattern backtracks over it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.envs.graders.answer import after_thinking, tail
from agentrl.errors import GradingError, did_you_mean
from agentrl.runtime.extras import require
from agentrl.types import JSON, RewardParts, Task

Arguments = Mapping[str, JSON]
Check = Callable[[str, Arguments], bool]

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|[A-Z])\.(?=\s)")
_WORD = re.compile(r"\w+")
_CAPITAL_WORD = re.compile(r"[^\s.,!?;:()\"'\[\]{}]+")
_FENCED = ("```json", "```Json", "```JSON", "```")
_PARAGRAPH = "***"
_RESPONSES = "******"


def _text(arguments: Arguments, name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r}, not a text")
    return value


def _number(arguments: Arguments, name: str) -> int:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` is {value!r}, not a number")
    return int(value)


def _texts(arguments: Arguments, name: str) -> list[str]:
    value = arguments.get(name)
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {value!r}, not a list")
    return [str(item) for item in value]


def _compares(count: int, arguments: Arguments, name: str, relation: str = "relation") -> bool:
    """Whether a count is `less than` the argument, or `at least` as much."""
    limit, wanted = _number(arguments, name), arguments.get(relation)
    if wanted not in ("less than", "at least"):
        raise ValueError(f"`{relation}` is {wanted!r}; write `less than` or `at least`")
    return count < limit if wanted == "less than" else count >= limit


def _occurrences(text: str, keyword: str) -> int:
    return text.casefold().count(keyword.casefold()) if keyword else 0


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _language_of(text: str) -> str | None:
    """The code of the text's language; None where it has no letters to tell it by."""
    require("the check of a language", "langdetect")
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


def _is_in(text: str, language: str) -> bool:
    # As in the reference: where no language can be detected, the instruction counts as followed.
    return _language_of(text) in (language, None)


def _sentences(text: str) -> int:
    """The number of sentences, by their closing marks; an unfinished last one counts."""
    text = _ABBREVIATIONS.sub("", text).strip()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    unfinished = text[ends[-1] :].strip() if ends else text
    return len(ends) + bool(unfinished)


def _placeholders(text: str) -> int:
    """The number of `[...]` within one line."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count


def _bullets(text: str) -> int:
    lines = [line.lstrip() for line in text.split("\n")]
    return sum(
        line.startswith("-") or (line.startswith("*") and line[1:2] not in ("", "*")) for line in lines
    )


def _highlights(text: str) -> int:
    """The number of `*...*` with content, and once more of `**...**`, each within one line."""
    return sum(_marked(line, mark) for line in text.split("\n") for mark in ("*", "**"))


def _marked(line: str, mark: str) -> int:
    """The number of texts between two marks in a line; none of them holds an asterisk."""
    count, start = 0, line.find(mark)
    while start >= 0 and (end := line.find("*", start + len(mark))) >= 0:
        closes = line.startswith(mark, end)
        count += closes and bool(line[start + len(mark) : end].strip())
        start = line.find(mark, end + len(mark) if closes else start + 1)
    return count


def _sections(text: str, splitter: str) -> int:
    return len(re.findall(rf"{re.escape(splitter)}\s?\d", text)) if splitter else 0


def _has_paragraphs(text: str, number: int) -> bool:
    parts = [part.strip() for part in text.split(_PARAGRAPH)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == number


def _first_word_is(text: str, arguments: Arguments) -> bool:
    paragraphs = text.split("\n\n")
    filled = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    nth = _number(arguments, "nth_paragraph")
    if filled != _number(arguments, "num_paragraphs") or not 1 <= nth <= filled:
        return False
    words = paragraphs[nth - 1].split(None, 1)
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0] if words else ""
    return bool(first) and first.lower() == _text(arguments, "first_word").lower()


def _has_postscript(text: str, marker: str) -> bool:
    if marker in ("P.S.", "P.P.S"):
        letters = r"p\.\s?p\.\s?s" if marker == "P.P.S" else r"p\.\s?s\."
        return re.search(letters, text.lower()) is not None
    return marker.lower() in text.lower()


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in _FENCED:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _are_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split(_RESPONSES)]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in _CAPITAL_WORD.findall(text))


INSTRUCTIONS: Mapping[str, Check] = {
    "keywords:existence": lambda text, a: all(_occurrences(text, word) for word in _texts(a, "keywords")),
    "keywords:frequency": lambda text, a: _compares(_occurrences(text, _text(a, "keyword")), a, "frequency"),
    "keywords:forbidden_words": lambda text, a: (
        not any(_has_word(text, word) for word in _texts(a, "forbidden_words"))
    ),
    "keywords:letter_frequency": lambda text, a: _compares(
        text.lower().count(_text(a, "letter").lower()), a, "let_frequency", "let_relation"
    ),
    "language:response_language": lambda text, a: _is_in(text, _text(a, "language")),
    "length_constraints:number_sentences": lambda text, a: _compares(_sentences(text), a, "num_sentences"),
    "length_constraints:number_paragraphs": lambda text, a: _has_paragraphs(
        text, _number(a, "num_paragraphs")
    ),
    "length_constraints:number_words": lambda text, a: _compares(len(_WORD.findall(text)), a, "num_words"),
    "length_constraints:nth_paragraph_first_word": _first_word_is,
    "detectable_content:number_placeholders": lambda text, a: (
        _placeholders(text) >= _number(a, "num_placeholders")
    ),
    "detectable_content:postscript": lambda text, a: _has_postscript(text, _text(a, "postscript_marker")),
    "detectable_format:number_bullet_lists": lambda text, a: _bullets(text) == _number(a, "num_bullets"),
    "detectable_format:constrained_response": lambda text, _: any(option in text for option in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": lambda text, a: (
        _highlights(text) >= _number(a, "num_highlights")
    ),
    "detectable_format:multiple_sections": lambda text, a: (
        _sections(text, _text(a, "section_spliter")) >= _number(a, "num_sections")
    ),
    "detectable_format:json_format": lambda text, _: _is_json(text),
    "detectable_format:title": lambda text, _: _has_title(text),
    "combination:two_responses": lambda text, _: _are_two_responses(text),
    "combination:repeat_prompt": lambda text, a: (
        text.strip().lower().startswith(_text(a, "prompt_to_repeat").strip().lower())
    ),
    "startend:end_checker": lambda text, a: (
        text.strip().strip('"').lower().endswith(_text(a, "end_phrase").strip().lower())
    ),
    "startend:quotation": lambda text, _: _is_quoted(text),
    "change_case:capital_word_frequency": lambda text, a: _compares(
        _capital_words(text), a, "capital_frequency", "capital_relation"
    ),
    "change_case:english_capital": lambda text, _: text.isupper() and _is_in(text, "en"),
    "change_case:english_lowercase": lambda text, _: text.islower() and _is_in(text, "en"),
    "punctuation:no_comma": lambda text, _: "," not in text,
}
"""The check of every instruction, by its id."""


@dataclass(frozen=True, kw_only=True)
class InstructionGrader:
    """1.0 where an answer follows every instruction of its task, else 0.0, as IFEval's prompt-level accuracy.

    The task's metadata has IFEval's columns: `instruction_id_list`, and `kwargs`, the arguments of each. The
    part `instructions` is the share of them that is followed. Only what follows `</think>` is read. Three
    instructions detect a language, which needs the extra `ifeval`.

    score: `all` = as above; `share` = the grade is the share.
    loose: whether an answer also follows an instruction where it does without its first line, its last line,
        both, or its asterisks.
    """

    score: Literal["all", "share"] = "all"
    loose: bool = False

    def grade(self, task: Task, answer: str) -> RewardParts:
        """The grade of an answer.

        Raises:
            GradingError: `invalid`, the task has no instructions, an unknown one or wrong arguments.
            MissingExtraError: an instruction needs langdetect.
        """
        instructions = _instructions(task)
        answer = tail(answer)
        final = after_thinking(answer)
        text = answer if final is None else final.strip()
        variants = _variants(text) if self.loose else [text]
        try:
            followed = [
                any(bool(variant.strip()) and INSTRUCTIONS[name](variant, arguments) for variant in variants)
                for name, arguments in instructions
            ]
        except ValueError as error:
            raise GradingError("invalid", f"the instructions of task {task.id}: {error}") from error
        share = sum(followed) / len(followed)
        return RewardParts(
            {"instructions": share}, total=float(all(followed)) if self.score == "all" else share
        )


def _instructions(task: Task) -> Sequence[tuple[str, Arguments]]:
    names, arguments = task.metadata.get("instruction_id_list"), task.metadata.get("kwargs")
    if not isinstance(names, list) or not names:
        raise GradingError("invalid", f"task {task.id} has no metadata `instruction_id_list`")
    tables = arguments if isinstance(arguments, list) else [{}] * len(names)
    if len(tables) != len(names):
        raise GradingError(
            "invalid", f"task {task.id} has {len(names)} instructions and {len(tables)} `kwargs`"
        )
    for name in names:
        if name not in INSTRUCTIONS:
            near = did_you_mean(str(name), INSTRUCTIONS)
            raise GradingError("invalid", f"task {task.id} has an unknown instruction `{name}`.{near}")
    return [
        (str(name), table if isinstance(table, dict) else {})
        for name, table in zip(names, tables, strict=True)
    ]


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    variants = [text, *cut]
    return [*variants, *(variant.replace("*", "") for variant in variants)]
