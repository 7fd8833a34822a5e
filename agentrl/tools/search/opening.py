"""Opens the index that a path names: a saved index, or a corpus that is indexed now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from agentrl.errors import UserError
from agentrl.tools.search import bm25, dense
from agentrl.tools.search.bm25 import Bm25Index
from agentrl.tools.search.corpus import Corpus, Watch, unwatched
from agentrl.tools.search.dense import DenseIndex, Encoder
from agentrl.tools.search.folder import Saved
from agentrl.tools.search.hybrid import HybridIndex
from agentrl.tools.search.index import SearchIndex

HYBRID = "hybrid"
KINDS = (bm25.KIND, dense.KIND, HYBRID)


def open_index(
    path: str | Path, *, kind: str | None = None, encoder: Encoder | None = None, watch: Watch = unwatched
) -> Callable[[], SearchIndex]:
    """A function that loads a saved index from a folder, or builds an index over a JSONL corpus.

    kind: `bm25`, `dense` or `hybrid`. None = the kind in the folder; over a corpus, dense where there is an
        encoder, else bm25.

    Raises:
        UserError: at once, where the path does not exist or an encoder is missing; when called, where the
            files or lines are invalid.
    """
    path = Path(path)
    if path.is_dir():
        kinds = Saved.at(path).kinds
        kind = kind or (kinds[0] if len(kinds) == 1 else HYBRID)
        build = partial(_load, path)
    elif path.is_file():
        kind = kind or (bm25.KIND if encoder is None else dense.KIND)
        build = partial(_build, path, watch=watch)
    else:
        raise UserError(f"There is no corpus and no saved index at {path}; name a JSONL file or a folder.")
    if kind not in KINDS:
        raise UserError(f"There is no index of kind {kind!r}; there are {', '.join(KINDS)}.")
    if kind != bm25.KIND and encoder is None:
        raise UserError(f"A {kind} index needs an encoder; name one, or use a bm25 index.")
    return partial(build, kind, encoder)


def _load(folder: Path, kind: str, encoder: Encoder | None) -> SearchIndex:
    if kind == bm25.KIND or encoder is None:
        return Bm25Index.load(folder)
    return (DenseIndex if kind == dense.KIND else HybridIndex).load(folder, encoder)


def _build(path: Path, kind: str, encoder: Encoder | None, *, watch: Watch) -> SearchIndex:
    corpus = Corpus.read(path, watch=watch)
    try:
        if kind == bm25.KIND or encoder is None:
            return Bm25Index(corpus, watch=watch)
        vectors = DenseIndex(corpus, encoder, watch=watch)
        return vectors if kind == dense.KIND else HybridIndex(Bm25Index(corpus, watch=watch), vectors)
    except ValueError as error:
        raise UserError(f"{path} cannot be indexed: {error}.") from error
