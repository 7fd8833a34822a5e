"""The published scores of Search-R1, written from their description, without a regular expression.

Normalisation: lower case; then every ASCII punctuation character is removed; then the words a, an and the are
blanks, where a word is a run of letters and digits; then blanks are merged. Extraction: an answer is what
stands between `<answer>` and the next `</answer>`, searched from left to right; a text with fewer than two of
them has none; the last one counts, without the blanks around it.
"""

from __future__ import annotations

import random
from itertools import groupby

ASCII_PUNCTUATION = {chr(code) for code in range(33, 127) if not chr(code).isalnum()}
ARTICLES = ("a", "an", "the")

_TAGS = ("<answer>", "</answer>", "<answer>", "</answer>", "<Answer>", "< answer>", "<answer", "</answer >")
_OTHERS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>")
_WORDS = (
    "Paris",
    "the",
    "The",
    "a",
    "A",
    "an",
    "AN",
    "theatre",
    "ana",
    "New",
    "York",
    "usa",
    "12",
    "1,2",
    "ß",
)
_SIGNS = (".", ",", "!", "-", "_", "'", '"', "(", "$", "`", "~", "–", "…", "’", "¿", "。")
_BLANKS = (" ", "  ", "\n", "\t", "\u00a0", "\u3000", "")


def normalized(text: str) -> str:
    """The normalised text."""
    kept = "".join(letter for letter in text.lower() if letter not in ASCII_PUNCTUATION)
    runs = ["".join(run) for _, run in groupby(kept, key=str.isalnum)]
    return " ".join("".join(" " if run in ARTICLES else run for run in runs).split())


def extracted(text: str) -> str | None:
    """The answer of a prompt with its response."""
    found = []
    for before_closing in text.split("</answer>")[:-1]:
        _, opened, inner = before_closing.partition("<answer>")
        if opened:
            found.append(inner)
    return found[-1].strip() if len(found) >= 2 else None


def scored(text: str, golden_answers: list[str], format_score: float = 0.0, score: float = 1.0) -> float:
    """The score of a prompt with its response."""
    answer = extracted(text)
    if answer is None:
        return 0.0
    matches = [normalized(answer) == normalized(gold) for gold in golden_answers]
    return score if any(matches) else format_score


def pieces(rng: random.Random, words: int) -> str:
    """A short text of words, signs and blanks."""
    return "".join(
        rng.choice(_WORDS) + rng.choice(_SIGNS) * (rng.random() < 0.3) + rng.choice(_BLANKS)
        for _ in range(words)
    )


def altered(rng: random.Random, text: str) -> str:
    """The same after normalisation, or nearly: another case, more signs, articles and blanks."""
    out = []
    for letter in text:
        out.append(letter.upper() if rng.random() < 0.3 else letter)
        if rng.random() < 0.1:
            out.append(rng.choice((*_SIGNS, " the ", " ", "x")))
    return "".join(out)


def cases(count: int, seed: int = 0) -> list[tuple[str, list[str]]]:
    """Texts with tags, complete and broken, and accepted answers that are near their answers."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        answer = pieces(rng, rng.randrange(4))
        blocks = [rng.choice((*_TAGS, *_OTHERS, pieces(rng, 2))) for _ in range(rng.randrange(6))]
        for _ in range(rng.randrange(4)):
            blocks.insert(
                rng.randrange(len(blocks) + 1), f"<answer>{rng.choice((answer, pieces(rng, 2)))}</answer>"
            )
        text = "".join(blocks)
        near = extracted(text) or answer
        golden = [
            rng.choice((altered(rng, near), pieces(rng, 2), answer)) for _ in range(rng.randrange(1, 4))
        ]
        drawn.append((text, golden))
    return drawn
