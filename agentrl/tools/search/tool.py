"""Search tools for models: over an index in this process, or over a remote server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agentrl.errors import ToolRejected
from agentrl.tools.base import Overrun, Tool
from agentrl.tools.running import in_thread
from agentrl.tools.schema import describe
from agentrl.tools.search.batching import Batcher
from agentrl.tools.search.index import Hit, SearchIndex, check_k, hits_of
from agentrl.tools.search.opening import open_index
from agentrl.tools.search.worker import WorkerThread
from agentrl.tools.shared import Shared
from agentrl.tools.toolkit import Toolkit
from agentrl.types.seams import ToolSchema

Search: TypeAlias = Callable[[str], Awaitable[Sequence[Hit]]]
NO_HITS = "Nothing was found; try other words."
MAX_QUERY_CHARS = 2000
"""Longer queries are refused: the time of a batch must not depend on how much one model writes."""


def as_documents(hits: Sequence[Hit]) -> str:
    """Passages in the format of Search-R1 (arXiv:2503.09516): `Doc 1(Title: ...) text`, a line each."""
    return "".join(
        f"Doc {number}(Title: {hit.passage.title}) {hit.passage.text}\n"
        for number, hit in enumerate(hits, start=1)
    )


async def _search(query: str) -> str:
    """Search a collection of passages.

    Args:
        query: what to look for
    """
    raise NotImplementedError(query)  # only its signature is used


@dataclass(eq=False, kw_only=True)
class _SearchToolkit(Toolkit):
    """The common part of both search tools. write: formats hits, at least one, for the model."""

    name: str = "search"
    k: int = 3
    description: str | None = None
    write: Callable[[Sequence[Hit]], str] = as_documents
    overrun: Overrun = field(default="model", init=False)

    def __post_init__(self) -> None:
        check_k(self.k)
        schema = describe(_search, name=self.name, description=self.description)
        self._tool = Tool.described(schema, self._unopened, overrun=self.overrun)
        self._shared = Shared(self._open, self.name)

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        """The schema of its one tool."""
        return (self._tool.schema,)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Sequence[Tool]]:
        """One tool, the same for every episode: a search has no state."""
        search = await self._shared.get()
        yield (replace(self._tool, function=partial(self._answer, search)),)

    @abstractmethod
    def _open(self) -> AbstractAsyncContextManager[Search]:
        """Open the search function; all episodes of an event loop share it."""

    async def _unopened(self, query: str) -> str:
        raise RuntimeError(f"open an episode of {self.name} to search for {query!r}")

    async def _answer(self, search: Search, query: str) -> str:
        query = " ".join(query.encode("utf-8", "replace").decode().split())
        if not query:
            raise ToolRejected("The query is empty; write what to look for.")
        if len(query) > MAX_QUERY_CHARS:
            raise ToolRejected(f"The query is too long; write at most {MAX_QUERY_CHARS} characters.")
        hits = await search(query)
        return self.write(hits) if hits else NO_HITS


@dataclass(eq=False)
class SearchTool(_SearchToolkit):
    """A search over an index in this process.

    index: an index; or the folder of a saved BM25 index, or a JSONL corpus, to be indexed with BM25; or a
        function that builds an index (see `open_index`). An index is built or loaded in a thread when the
        first episode is opened.
    k: passages for a query, at most.
    max_batch: queries of one batch. Queries run in a thread, a batch at a time; those that arrive meanwhile
        form the next batch.

    Raises:
        UserError: there is no index and no corpus of that name.
        ValueError: k is less than 1.
    """

    index: SearchIndex | str | Path | Callable[[], SearchIndex]
    max_batch: int = field(default=64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.index, str | Path):
            self.index = open_index(self.index)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Search]:
        index = self.index
        if callable(index):
            # Stored for the next event loop, too.
            index = self.index = await in_thread(index, "search index")
        assert not isinstance(index, str | Path), "a path has become a function"
        worker = WorkerThread(self.name)

        async def answer(queries: Sequence[str]) -> Sequence[Sequence[Hit]]:
            return await worker.call(partial(hits_of, index, queries, self.k))

        batcher = Batcher[str, Sequence[Hit]](answer, max_batch=self.max_batch)
        try:
            yield batcher.submit
        finally:
            await batcher.close()
            worker.close()


@dataclass(eq=False)
class RemoteSearchTool(_SearchToolkit):
    """A search over any server that implements Search-R1's `/retrieve`: `agentrl serve-search`, or another.

    All episodes share one `SearchClient`, which documents the settings. Its failures, and overrunning the
    environment's deadline, count as failures of the world: the episode is replaced.

    Raises:
        ConfigError: the address is invalid, or a setting is out of range.
        ValueError: k is less than 1.
    """

    url: str
    timeout_s: float = field(default=30.0, kw_only=True)
    attempts: int = field(default=5, kw_only=True)
    max_batch: int = field(default=64, kw_only=True)
    cache_size: int = field(default=4096, kw_only=True)
    headers: dict[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    overrun: Overrun = field(default="world", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        from agentrl.tools.search.client import SearchClient

        self.client = SearchClient(
            self.url,
            k=self.k,
            timeout_s=self.timeout_s,
            attempts=self.attempts,
            max_batch=self.max_batch,
            cache_size=self.cache_size,
            headers=self.headers,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Search]:
        async with self.client.connected() as search:
            yield search
