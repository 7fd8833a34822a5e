"""Search by words: BM25 over passages, scored by `bm25s`, queried without its batch machinery."""

from __future__ import annotations

import re
from collections.abc import Sequence

import bm25s
import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The lower-cased words of a text, in order, repeats kept."""
    return _WORD.findall(text.lower())


class Bm25Index:
    """An immutable index over passages. Built once and shared; queries take no locks and no threads.

    Okapi BM25 as Lucene computes it (k1 = 1.5, b = 0.75): Robertson & Zaragoza, "The Probabilistic
    Relevance Framework: BM25 and Beyond" (2009).

    Raises:
        ValueError: there is no word in any passage.
    """

    def __init__(self, passages: Sequence[str]) -> None:
        self._passages = tuple(passages)
        tokens = [words(passage) for passage in self._passages]
        if not any(tokens):
            raise ValueError("an index needs at least one passage with a word in it")
        retriever = bm25s.BM25()
        retriever.index(tokens, show_progress=False)
        starts: list[int] = retriever.scores["indptr"].tolist()
        self._postings = {
            word: (
                retriever.scores["indices"][starts[row] : starts[row + 1]],
                retriever.scores["data"][starts[row] : starts[row + 1]],
            )
            for word, row in retriever.vocab_dict.items()
            if word  # the library adds an empty one, without a row
        }

    def __len__(self) -> int:
        return len(self._passages)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """The score of every passage, float32 [number of passages]; 0 = no word in common."""
        total = np.zeros(len(self._passages), np.float32)
        for word in words(query):
            if word in self._postings:
                rows, weights = self._postings[word]
                total[rows] += weights
        return total

    def search(self, query: str, k: int = 1) -> list[str]:
        """At most `k` passages that share a word with the query, best first; ties by position.

        Raises:
            ValueError: k is less than 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        scores = self.scores(query)
        if k == 1:
            best = int(scores.argmax())
            return [self._passages[best]] if scores[best] > 0 else []
        count = min(k, len(scores))
        # Everything as good as the k-th: a bare partition would break ties at random.
        worst = np.partition(scores, -count)[-count]
        near = np.flatnonzero((scores >= worst) & (scores > 0))
        order = near[np.argsort(-scores[near], kind="stable")]
        return [self._passages[row] for row in order[:count]]
