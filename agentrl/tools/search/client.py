"""A client of any server that implements Search-R1's `/retrieve`, with few connections and few requests."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx2

from agentrl.errors import ConfigError, ToolError
from agentrl.http.guarded import AllowedAddresses
from agentrl.http.requests import MAX_VALUES, Backoff, Retrying, StatusError, body_of, failure_kind, off_loop
from agentrl.tools.search import wire
from agentrl.tools.search.batching import Batcher
from agentrl.tools.search.index import Hit

_MAX_BATCH = wire.QueryBounds().max_queries
_MAX_REPLY_BYTES = 32 << 20
_VALUES_OF_HIT = 8
_CONNECT_TIMEOUT_S = 5.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


@dataclass(eq=False, kw_only=True)
class SearchClient:
    """Sends the queries of many concurrent callers to one server.

    Concurrent queries share a request, and equal queries are sent once; requests share connections. A query
    changes nothing on the server, so it is sent again, after an exponential backoff, where the connection
    breaks or the server returns 429, 502, 503 or 504. Replies are cached for the lifetime of the client.

    url: of the server, or of its `/retrieve`; no other origin is ever reached.
    k: passages for a query, at most.
    timeout_s: for one query in total: waiting in the queue, all attempts and the waits between them.
    attempts: how often a request is sent, at most.
    max_batch: queries of one request. max_requests: requests at a time.
    cache_size: queries whose passages are cached, least recently used dropped first. 0 = none.
    counts: `requests` sent, of which `retries`; `queries` in them; `cached` queries, which were not sent.

    Raises:
        ConfigError: the address is invalid, or a setting is out of range.
    """

    url: str = field(kw_only=False)
    k: int = wire.DEFAULT_TOPK
    timeout_s: float = 30.0
    attempts: int = 5
    max_batch: int = 64
    max_requests: int = 4
    cache_size: int = 4096
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        for name in ("k", "attempts", "max_batch", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a search client must be at least 1, got {getattr(self, name)}.")
        if self.max_batch > _MAX_BATCH:
            raise ConfigError(f"max_batch of a search client is at most {_MAX_BATCH}.")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)) or self.cache_size < 0:
            raise ConfigError("A search client needs a timeout_s above 0 and a cache_size of at least 0.")
        self._allowed = AllowedAddresses(self.url)
        url = httpx2.URL(self.url)
        self._url = url.copy_with(path=wire.PATH) if url.path in ("", "/") else url
        self._cache: OrderedDict[str, tuple[Hit, ...]] = OrderedDict()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Callable[[str], Awaitable[tuple[Hit, ...]]]]:
        """Hold connections open; yields `search(query)`, which raises a ToolError where it fails.

        ToolError kinds: `unavailable` (no connection, no reply in time, or busy to the last attempt),
        `crashed` (the connection broke, or status 500), `refused` (401, 403, or a redirect to another
        origin), `protocol` (any other reply).
        """
        timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        async with self._allowed.client(timeout_s=None, headers=self.headers) as http:
            http.timeout = timeout
            batcher = Batcher[str, tuple[Hit, ...]](
                partial(self._retrieve, http), max_batch=self.max_batch, max_in_flight=self.max_requests
            )
            try:
                yield partial(self._search, batcher)
            finally:
                await batcher.close()

    async def _search(self, batcher: Batcher[str, tuple[Hit, ...]], query: str) -> tuple[Hit, ...]:
        if (cached := self._cache.get(query)) is not None:
            self._cache.move_to_end(query)
            self.counts["cached"] += 1
            return cached
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                hits = await batcher.submit(query)
        except TimeoutError:
            raise ToolError("unavailable", f"{self._url} did not answer in {self.timeout_s:g} s") from None
        self._store(query, hits)
        return hits

    def _store(self, query: str, hits: tuple[Hit, ...]) -> None:
        self._cache[query] = hits
        self._cache.move_to_end(query)
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)

    async def _retrieve(self, http: httpx2.AsyncClient, queries: Sequence[str]) -> Sequence[tuple[Hit, ...]]:
        unique = tuple(dict.fromkeys(queries))
        retrying = Retrying(Backoff(self.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        request = wire.RetrieveRequest(unique, self.k, return_scores=True)
        try:
            body = await retrying(partial(self._send, http, request), self._count_retry)
            results = await off_loop(partial(wire.read_reply, queries=len(unique), topk=self.k), body)
        except (httpx2.HTTPError, StatusError, ValueError) as error:
            raise self._failure(error) from error
        by_query = dict(zip(unique, results, strict=True))
        return [by_query[query] for query in queries]

    async def _send(self, http: httpx2.AsyncClient, request: wire.RetrieveRequest) -> bytes:
        self.counts["requests"] += 1
        self.counts["queries"] += len(request.queries)
        content, hits = wire.request_body(request), len(request.queries) * request.topk
        values = max(MAX_VALUES, _VALUES_OF_HIT * hits)
        return await body_of(http, "POST", self._url, content, max_bytes=_MAX_REPLY_BYTES, max_values=values)

    def _count_retry(self, error: Exception) -> None:
        del error
        self.counts["retries"] += 1

    def _failure(self, error: Exception) -> ToolError:
        reason = str(error) or type(error).__name__
        return ToolError(failure_kind(error), f"{self._url}: {reason}")
