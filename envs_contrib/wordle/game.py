"""The marks of a guess, and the words that agree with all marks so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

RIGHT, ELSEWHERE, ABSENT = "G", "Y", "X"
"""The mark of a letter: in its place, at another place of the word, or not there (again)."""

_FEW = 16


@lru_cache(maxsize=1 << 18)
def marks(guess: str, answer: str) -> str:
    """The five marks of a guess.

    A letter is marked as often as the answer has it: places that are right first, then from left to right.
    So `eerie` gets YXYXG where the answer is `there`: the last E is right, one of the others is elsewhere.
    """
    left = Counter(letter for letter, own in zip(answer, guess, strict=True) if letter != own)
    result = []
    for letter, own in zip(guess, answer, strict=True):
        if letter == own:
            result.append(RIGHT)
        elif left[letter]:
            left[letter] -= 1
            result.append(ELSEWHERE)
        else:
            result.append(ABSENT)
    return "".join(result)


def consistent(words: Iterable[str], guess: str, seen: str) -> list[str]:
    """The words for which a guess would have got the marks `seen`."""
    return [word for word in words if marks(guess, word) == seen]


def best_guess(words: Sequence[str], candidates: Sequence[str]) -> str:
    """A guess that narrows the candidates well.

    Of many candidates the one whose letters are most frequent among them; of few the one that tells most of
    them apart, or, where that is not half of them, the word that does. words: all that may be guessed.
    """
    if len(candidates) <= 2:
        return candidates[0]
    if len(candidates) > _FEW:
        frequency = Counter(letter for word in candidates for letter in set(word))
        return max(candidates, key=lambda word: sum(frequency[letter] for letter in set(word)))
    best = max(candidates, key=lambda word: _num_distinct(word, candidates))
    if 2 * _num_distinct(best, candidates) >= len(candidates):
        return best
    return max((best, *words), key=lambda word: _num_distinct(word, candidates))


def _num_distinct(guess: str, candidates: Sequence[str]) -> int:
    return len({marks(guess, answer) for answer in candidates})
