"""A grader of groups that compares the words of siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import UserError
from agentrl.types import Episode

_MAX_CHARS = 20_000


@dataclass(frozen=True, kw_only=True)
class DiversityGrader:
    """How different an answer is from its siblings: 1 - the mean Jaccard similarity of their n-grams.

    1.0 where it shares no n-gram of words with any sibling, and without siblings; 0.0 where all are the same.
    Of an answer the last 20,000 characters are read.

    n: words of an n-gram; a shorter answer is one n-gram.

    Raises:
        UserError: n is below 1.
    """

    n: int = 3

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"the grader `diversity` needs n of at least 1, got {self.n}.")

    def grade(self, siblings: Sequence[Episode]) -> list[float]:
        """The diversity of each sibling of one group."""
        grams = [self._grams(episode.turns[-1].action.text if episode.turns else "") for episode in siblings]
        return [1.0 - _mean_similarity(own, grams[:k] + grams[k + 1 :]) for k, own in enumerate(grams)]

    def _grams(self, text: str) -> frozenset[tuple[str, ...]]:
        words = text[-_MAX_CHARS:].lower().split()
        return frozenset(tuple(words[k : k + self.n]) for k in range(max(len(words) - self.n, 0) + 1))


def _mean_similarity(own: frozenset[tuple[str, ...]], others: Sequence[frozenset[tuple[str, ...]]]) -> float:
    similarities = [len(own & other) / len(own | other) for other in others]
    return sum(similarities) / len(similarities) if similarities else 0.0
