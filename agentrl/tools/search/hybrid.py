"""Search by words and by meaning together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from agentrl.tools.search import bm25, dense
from agentrl.tools.search import folder as folders
from agentrl.tools.search.bm25 import Bm25Index
from agentrl.tools.search.corpus import Corpus
from agentrl.tools.search.dense import DenseIndex, Encoder
from agentrl.tools.search.index import Ranked, check_k

_FUSION_FILE = "hybrid.json"


class HybridIndex:
    """Two indexes over one corpus, their rankings fused by reciprocal rank.

    score(passage) = sum over the rankings that hold it of 1 / (constant + its rank, from 1): Cormack, Clarke
    & Buettcher, "Reciprocal Rank Fusion Outperforms Condorcet and Individual Rank Learning Methods" (2009),
    where the constant is 60.

    depth: how many rows of each ranking are fused, at least `k`.

    Raises:
        ValueError: the two are over different corpora.
    """

    def __init__(
        self, words: Bm25Index, meaning: DenseIndex, *, depth: int = 100, constant: float = 60.0
    ) -> None:
        if not _same(words.corpus, meaning.corpus):
            raise ValueError("a hybrid index needs two indexes over the same corpus")
        self.corpus = words.corpus
        self._parts = (words, meaning)
        self._depth = depth
        self._constant = constant

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder, *, mmap: bool = True) -> HybridIndex:
        """A saved index.

        Raises:
            UserError: the folder holds no such index, an incomplete one, or one of another encoder.
        """
        words, meaning = Bm25Index.load(folder, mmap=mmap), DenseIndex.load(folder, encoder, mmap=mmap)
        with folders.Saved.at(folder).reading(dense.KIND) as files:
            settings = json.loads((files / _FUSION_FILE).read_text(encoding="utf-8"))
            return cls(words, meaning, depth=int(settings["depth"]), constant=float(settings["constant"]))

    def save(self, folder: str | Path) -> None:
        """Save both indexes and their corpus in a new folder.

        Raises:
            UserError: the folder is not empty, or writing fails.
        """
        folders.save(folder, self.corpus, [bm25.KIND, dense.KIND], self.write)

    def write(self, folder: Path) -> None:
        """Write everything but the corpus into an existing folder."""
        for part in self._parts:
            part.write(folder)
        fusion = {"depth": self._depth, "constant": self._constant}
        (folder / _FUSION_FILE).write_text(json.dumps(fusion), encoding="utf-8")

    def __len__(self) -> int:
        return len(self.corpus)

    def rank(self, queries: Sequence[str], k: int) -> list[list[Ranked]]:
        """The best `k` rows of both rankings for each query; ties by position.

        Raises:
            ValueError: k is less than 1.
        """
        check_k(k)
        rankings = [part.rank(queries, max(k, self._depth)) for part in self._parts]
        return [self._fused(of_query)[:k] for of_query in zip(*rankings, strict=True)]

    def _fused(self, rankings: Sequence[Sequence[Ranked]]) -> list[Ranked]:
        scores: dict[int, float] = defaultdict(float)
        for ranking in rankings:
            for rank, (row, _) in enumerate(ranking, start=1):
                scores[row] += 1 / (self._constant + rank)
        return sorted(
            (Ranked(*item) for item in scores.items()), key=lambda ranked: (-ranked.score, ranked.row)
        )


def _same(corpus: Corpus, other: Corpus) -> bool:
    """Whether two corpora are the same, judged by a sample of their passages."""
    rows = range(0, len(corpus), max(1, len(corpus) // 64))
    return corpus is other or (len(corpus) == len(other) and all(corpus[row] == other[row] for row in rows))
