"""What all indexes have in common: they rank the rows of a corpus for a batch of queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.tools.search.corpus import Corpus, Passage


class Ranked(NamedTuple):
    """A row of the corpus and its score: the higher, the better."""

    row: int
    score: float


class Hit(NamedTuple):
    """A passage that was found. score: None where a server tells none."""

    passage: Passage
    score: float | None


class SearchIndex(Protocol):
    """An index over a corpus; immutable, and used by many threads at once."""

    @property
    def corpus(self) -> Corpus:
        """What is searched."""

    def rank(self, queries: Sequence[str], k: int) -> list[list[Ranked]]:
        """At most `k` rows for each query, best first.

        Raises:
            ValueError: k is less than 1.
        """

    def save(self, folder: str | Path) -> None:
        """Keep the index and its corpus in a new folder.

        Raises:
            UserError: something is there already, or the disk says no.
        """


def found(index: SearchIndex, queries: Sequence[str], k: int) -> list[tuple[Hit, ...]]:
    """At most `k` passages for each query, best first."""
    ranked = index.rank(queries, k)
    return [tuple(Hit(index.corpus[row], score) for row, score in rows) for rows in ranked]


def at_least_one(k: int) -> None:
    """Refuse to look for nothing.

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
