"""The interface of all indexes: they rank the rows of a corpus for a batch of queries."""

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
    """A passage that matches a query. score: None where a server returns none."""

    passage: Passage
    score: float | None


class SearchIndex(Protocol):
    """An index over a corpus; immutable, and used by many threads at once."""

    @property
    def corpus(self) -> Corpus:
        """The corpus that is searched."""

    def rank(self, queries: Sequence[str], k: int) -> list[list[Ranked]]:
        """At most `k` rows for each query, best first.

        Raises:
            ValueError: k is less than 1.
        """

    def save(self, folder: str | Path) -> None:
        """Save the index and its corpus in a new folder.

        Raises:
            UserError: the folder is not empty, or writing fails.
        """


def hits_of(index: SearchIndex, queries: Sequence[str], k: int) -> list[tuple[Hit, ...]]:
    """At most `k` passages for each query, best first."""
    ranked = index.rank(queries, k)
    return [tuple(Hit(index.corpus[row], score) for row, score in rows) for rows in ranked]


def check_k(k: int) -> None:
    """Check the number of passages for a query.

    Raises:
        ValueError: k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
