"""Search by words: BM25 over passages, scored by `bm25s`, queried without its batch machinery."""

from __future__ import annotations

import builtins
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.tools.search import folder as folders
from agentrl.tools.search.corpus import Corpus, Watch, unwatched
from agentrl.tools.search.index import Ranked, check_k

if TYPE_CHECKING:
    import bm25s

KIND = "bm25"
_WORD = re.compile(r"\w+")
_MAX_WORDS_IN_EVERY_PASSAGE = 32
# numpy adds a chunk without a pause for other threads, such as the one of an event loop: about a millisecond.
_CHUNK = 1 << 18
_CACHED_WORDS = 1 << 16
_LOADING = threading.Lock()
_Postings: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


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

    def __init__(self, passages: Sequence[str] | Corpus, *, watch: Watch = unwatched) -> None:
        corpus = passages if isinstance(passages, Corpus) else Corpus.of(passages)
        rows = range(len(corpus))
        tokens = [words(corpus.contents[row]) for row in watch(rows, "splitting into words", len(rows))]
        if not any(tokens):
            raise ValueError("an index needs at least one passage with a word in it")
        retriever = _library().BM25()
        retriever.index(tokens, show_progress=False)
        self._set(corpus, retriever)

    def _set(self, corpus: Corpus, retriever: bm25s.BM25) -> None:
        self.corpus = corpus
        self._retriever = retriever
        # As plain arrays: slices of a memmap cost ten times as much.
        self._rows: npt.NDArray[np.int32] = np.asarray(retriever.scores["indices"])
        self._weights: npt.NDArray[np.float32] = np.asarray(retriever.scores["data"])
        self._starts: list[int] = retriever.scores["indptr"].tolist()
        # The library adds an empty word, which has no posting.
        self._numbers: dict[str, int] = {word: n for word, n in retriever.vocab_dict.items() if word}
        self._postings: dict[str, _Postings] = {}

    @classmethod
    def load(cls, folder: str | Path, *, mmap: bool = True) -> Bm25Index:
        """A saved index. mmap: postings and passages stay on disk until they are read.

        Raises:
            UserError: the folder holds no such index, or an incomplete one.
        """
        with folders.Saved.at(folder).reading(KIND) as files:
            corpus = Corpus.saved(files, mmap=mmap)
            retriever = _library().BM25.load(files, mmap=mmap, show_progress=False)
            sizes = retriever.scores["num_docs"], len(retriever.scores["indices"])
            if sizes != (len(corpus), retriever.scores["indptr"][-1]):
                raise ValueError("postings and passages differ in number")
            index = cls.__new__(cls)
            index._set(corpus, retriever)
        return index

    def save(self, folder: str | Path) -> None:
        """Save the index and its corpus in a new folder, in the files of `bm25s`.

        Raises:
            UserError: the folder is not empty, or writing fails.
        """
        folders.save(folder, self.corpus, [KIND], self.write)

    def write(self, folder: Path) -> None:
        """Write everything but the corpus into an existing folder."""
        self._retriever.save(folder, show_progress=False)

    def __len__(self) -> int:
        return len(self.corpus)

    def scores(self, query: str) -> npt.NDArray[np.float32]:
        """The score of every passage, float32 [number of passages]; 0 = no word in common.

        A repeated word is added once, times its count. The work for a query is at most that for 32 different
        words which occur in every passage: of a query beyond that, only the rarest words are scored.
        """
        total = np.zeros(len(self.corpus), np.float32)
        for (rows, weights), count in self._scored(query):
            for start in range(0, len(rows), _CHUNK):
                part = slice(start, start + _CHUNK)
                added = weights[part] if count == 1 else weights[part] * np.float32(count)
                np.add.at(total, rows[part], added)  # three times as fast as `total[rows] += added`
        return total

    def _scored(self, query: str) -> list[tuple[_Postings, int]]:
        """The postings of the different words of a query, and how often it has each."""
        counts = Counter(words(query))
        known = [
            (postings, count)
            for word, count in counts.items()
            if (postings := self._postings.get(word) or self._look_up(word)) is not None
        ]
        left = _MAX_WORDS_IN_EVERY_PASSAGE * len(self.corpus)
        if sum(len(rows) for (rows, _), _ in known) <= left:
            return known
        affordable = []
        for postings, count in sorted(known, key=lambda entry: len(entry[0][0])):
            left -= len(postings[0])
            if left < 0:
                break
            affordable.append((postings, count))
        return affordable

    def search(self, query: str, k: int = 1) -> list[str]:
        """At most `k` passages that share a word with the query, best first; ties by position.

        Raises:
            ValueError: k is less than 1.
        """
        return [self.corpus.contents[row] for row in self._best(self.scores(query), k)]

    def rank(self, queries: Sequence[str], k: int) -> list[list[Ranked]]:
        """At most `k` rows for each query that share a word with it, best first; ties by position.

        Raises:
            ValueError: k is less than 1.
        """
        ranked = []
        for query in queries:
            scores = self.scores(query)
            ranked.append([Ranked(row, float(scores[row])) for row in self._best(scores, k)])
        return ranked

    def _look_up(self, word: str) -> _Postings | None:
        number = self._numbers.get(word)
        if number is None:
            return None
        if len(self._postings) >= _CACHED_WORDS:
            self._postings.clear()
        span = slice(self._starts[number], self._starts[number + 1])
        self._postings[word] = postings = self._rows[span], self._weights[span]
        return postings

    @staticmethod
    def _best(scores: npt.NDArray[np.float32], k: int) -> list[int]:
        check_k(k)
        if k == 1:
            best = int(scores.argmax())
            return [best] if scores[best] > 0 else []
        count = min(k, len(scores))
        # All scores that equal the k-th, too: a partition by itself would break ties at random.
        worst = np.partition(scores, -count)[-count]
        near = np.flatnonzero(scores >= worst if worst > 0 else scores > 0)
        order = near[np.argsort(-scores[near], kind="stable")]
        best_first: list[int] = order[:count].tolist()
        return best_first


def _library() -> ModuleType:
    """bm25s, loaded without JAX.

    Where JAX is installed, bm25s computes something with it when it is imported, for a search that nobody
    here calls; and JAX takes three quarters of the memory of a card with its first computation.
    """
    with _LOADING:
        if "bm25s" in sys.modules:
            return import_module("bm25s")
        with _hidden("jax"):
            return import_module("bm25s")


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let no import of this thread find a package, for the block.

    Other threads do, and whoever has imported it keeps it: that is why sys.modules stays as it is.
    """
    load, thread = builtins.__import__, threading.get_ident()

    def load_others(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if threading.get_ident() == thread and not level and name.partition(".")[0] == package:
            raise ImportError(f"{package} is not wanted here")
        return load(name, globals, locals, fromlist, level)

    builtins.__import__ = load_others
    try:
        yield
    finally:
        builtins.__import__ = load
