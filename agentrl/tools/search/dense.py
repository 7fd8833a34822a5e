"""Search by meaning: vectors of an encoder, ranked by `faiss`.

The encoder is an argument, since encoders need torch, and tools do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.runtime.extras import require
from agentrl.tools.search import folder as folders
from agentrl.tools.search.corpus import Corpus, Watch, unwatched
from agentrl.tools.search.index import Ranked, check_k

if TYPE_CHECKING:
    import faiss

KIND = "dense"
Encoder: TypeAlias = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""From n texts to their vectors, float32 [n, d], d the same every time."""
EXACT = "Flat"
_BATCH = 256
VECTORS_FILE = "dense.faiss"
_PROBE_FILE = "dense.probe.npy"
_SAME_ENCODER = 0.999


class DenseIndex:
    """An index over the vectors of passages: ranked by inner product, exactly by default.

    factory: the kind of index, as `faiss.index_factory` spells it. `Flat` compares with every vector.

    Raises:
        UserError: faiss is not installed.
        ValueError: there is no passage, or the encoder does not return one float32 vector for each text.
    """

    def __init__(
        self,
        passages: Sequence[str] | Corpus,
        encoder: Encoder,
        *,
        factory: str = EXACT,
        watch: Watch = unwatched,
    ) -> None:
        faiss = _faiss()
        corpus = passages if isinstance(passages, Corpus) else Corpus.of(passages)
        if not len(corpus):
            raise ValueError("an index needs at least one passage")
        starts = range(0, len(corpus), _BATCH)
        batches = (_rows(corpus, start) for start in watch(starts, "encoding", len(starts)))
        vectors = np.concatenate([encoded(encoder, batch) for batch in batches])
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        self._set(corpus, encoder, index)

    def _set(self, corpus: Corpus, encoder: Encoder, index: faiss.Index) -> None:
        self.corpus = corpus
        self._encoder = encoder
        self._index = index

    @classmethod
    def load(cls, folder: str | Path, encoder: Encoder, *, mmap: bool = True) -> DenseIndex:
        """A saved index. mmap: passages, and vectors where faiss can, stay on disk.

        Raises:
            UserError: the folder holds no such index, an incomplete one, or one of another encoder.
        """
        faiss = _faiss()
        with folders.Saved.at(folder).reading(KIND) as files:
            corpus = Corpus.saved(files, mmap=mmap)
            index = faiss.read_index(str(files / VECTORS_FILE), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
            probe = np.load(files / _PROBE_FILE, allow_pickle=False)
            if (index.ntotal, index.metric_type) != (len(corpus), faiss.METRIC_INNER_PRODUCT):
                raise ValueError("vectors and passages differ in number")
        if not _agree(probe, encoded(encoder, [corpus.contents[0]])[0]):
            raise UserError(f"The index in {folder} was built with another encoder; name that one.")
        dense = cls.__new__(cls)
        dense._set(corpus, encoder, index)
        return dense

    def save(self, folder: str | Path) -> None:
        """Save the index and its corpus in a new folder. The encoder is not saved.

        Raises:
            UserError: the folder is not empty, or writing fails.
        """
        folders.save(folder, self.corpus, [KIND], self.write)

    def write(self, folder: Path) -> None:
        """Write everything but the corpus into an existing folder."""
        _faiss().write_index(self._index, str(folder / VECTORS_FILE))
        np.save(
            folder / _PROBE_FILE, encoded(self._encoder, [self.corpus.contents[0]])[0], allow_pickle=False
        )

    def __len__(self) -> int:
        return len(self.corpus)

    def rank(self, queries: Sequence[str], k: int) -> list[list[Ranked]]:
        """The `k` rows nearest to each query, best first.

        Raises:
            ValueError: k is less than 1, or the encoder does not return one float32 vector for each query.
        """
        check_k(k)
        if not queries:
            return []
        scores, rows = self._index.search(encoded(self._encoder, queries), min(k, len(self.corpus)))
        # An index that is not exact may find fewer; it fills the rest with row -1.
        return [
            [Ranked(row, score) for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def encoded(encoder: Encoder, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """The vectors of some texts, float32 [n, d].

    Raises:
        ValueError: the encoder returned something else.
    """
    vectors = np.ascontiguousarray(encoder(texts))
    if vectors.dtype != np.float32 or vectors.ndim != 2 or len(vectors) != len(texts):
        shape = f"{vectors.dtype} {list(vectors.shape)}"
        raise ValueError(f"an encoder returns float32 [{len(texts)}, d] for {len(texts)} texts, got {shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("an encoder returns finite numbers; there are others among them")
    return vectors


def _rows(corpus: Corpus, start: int) -> list[str]:
    return [corpus.contents[row] for row in range(start, min(start + _BATCH, len(corpus)))]


def _agree(vector: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> bool:
    """Whether two vectors point the same way, up to rounding."""
    if vector.shape != other.shape:
        return False
    product = float(np.linalg.norm(vector) * np.linalg.norm(other))
    return float(vector @ other) >= _SAME_ENCODER * product


def _faiss() -> ModuleType:
    require("dense search", "faiss")
    import faiss

    return faiss
