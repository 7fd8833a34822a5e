"""A client of any server that speaks Search-R1's `/retrieve`: few connections, few requests, no guesses."""

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
from agentrl.retrying import BUSY, Backoff, Retrying, StatusError, body_of
from agentrl.tools.http import AllowedAddresses
from agentrl.tools.search import wire
from agentrl.tools.search.batching import Batcher
from agentrl.tools.search.index import Hit

_MOST_IN_A_BATCH = wire.Bounds().max_queries
_MAX_REPLY_BYTES = 32 << 20
_CONNECT_TIMEOUT_S = 5.0
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 5.0


@dataclass(eq=False, kw_only=True)
class SearchClient:
    """Asks one server, for many callers at once.

    Concurrent queries share a request, equal ones a place in it; requests share connections. A query changes
    nothing on the server, so it is sent again, after a wait that grows, where the connection breaks or the
    server says 429, 502, 503 or 504. What was found is kept for as long as the client lives.

    url: of the server, or of its `/retrieve`; no other origin is ever reached.
    k: passages for a query, at most.
    timeout_s: for one query from first to last: waiting its turn, all attempts and the waits between them.
    attempts: how often a request is sent, at most.
    max_batch: queries of one request. max_requests: requests at a time.
    cache_size: queries whose passages are kept, the latest used. 0 = none.
    counts: `requests` sent, of which `retries`; `queries` in them; `cached` ones, which went nowhere.

    Raises:
        ConfigError: the address is none, or a setting is out of range.
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
        if self.max_batch > _MOST_IN_A_BATCH:
            raise ConfigError(f"max_batch of a search client is at most {_MOST_IN_A_BATCH}.")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)) or self.cache_size < 0:
            raise ConfigError("A search client needs a timeout_s above 0 and a cache_size of at least 0.")
        self._allowed = AllowedAddresses(self.url)
        url = httpx2.URL(self.url)
        self._url = url.copy_with(path=wire.PATH) if url.path in ("", "/") else url
        self._cache: OrderedDict[str, tuple[Hit, ...]] = OrderedDict()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Callable[[str], Awaitable[tuple[Hit, ...]]]]:
        """Hold connections open; gives `search(query)`, which raises a ToolError where it fails.

        ToolError kinds: `unavailable` (no connection, no answer in time, or busy to the last attempt),
        `crashed` (it broke off, or says 500), `refused` (401, 403, or a redirect elsewhere), `protocol` (any
        other answer).
        """
        timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        async with self._allowed.client(timeout_s=None, headers=self.headers) as http:
            http.timeout = timeout
            batcher = Batcher[str, tuple[Hit, ...]](
                partial(self._retrieved, http), most=self.max_batch, at_once=self.max_requests
            )
            try:
                yield partial(self._search, batcher)
            finally:
                await batcher.close()

    async def _search(self, batcher: Batcher[str, tuple[Hit, ...]], query: str) -> tuple[Hit, ...]:
        if (kept := self._cache.get(query)) is not None:
            self._cache.move_to_end(query)
            self.counts["cached"] += 1
            return kept
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                hits = await batcher.ask(query)
        except TimeoutError:
            raise ToolError("unavailable", f"{self._url} did not answer in {self.timeout_s:g} s") from None
        self._keep(query, hits)
        return hits

    def _keep(self, query: str, hits: tuple[Hit, ...]) -> None:
        self._cache[query] = hits
        self._cache.move_to_end(query)
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)

    async def _retrieved(self, http: httpx2.AsyncClient, queries: Sequence[str]) -> Sequence[tuple[Hit, ...]]:
        different = tuple(dict.fromkeys(queries))
        retrying = Retrying(Backoff(self.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        request = wire.RetrieveRequest(different, self.k, return_scores=True)
        try:
            body = await retrying(partial(self._sent, http, request), self._count_retry)
            found = wire.read_reply(body, len(different), self.k)
        except (httpx2.HTTPError, StatusError, ValueError) as error:
            raise self._failure(error) from error
        by_query = dict(zip(different, found, strict=True))
        return [by_query[query] for query in queries]

    async def _sent(self, http: httpx2.AsyncClient, request: wire.RetrieveRequest) -> bytes:
        self.counts["requests"] += 1
        self.counts["queries"] += len(request.queries)
        return await body_of(http, "POST", self._url, wire.written(request), most_bytes=_MAX_REPLY_BYTES)

    def _count_retry(self, error: Exception) -> None:
        del error
        self.counts["retries"] += 1

    def _failure(self, error: Exception) -> ToolError:
        kind = "protocol"
        match error:
            case StatusError(status=status) if status in BUSY:
                kind = "unavailable"
            case StatusError(status=401 | 403):
                kind = "refused"
            case (
                StatusError(status=500)
                | httpx2.ReadError()
                | httpx2.WriteError()
                | httpx2.RemoteProtocolError()
            ):
                kind = "crashed"
            case httpx2.ConnectError() | httpx2.TimeoutException():
                kind = "unavailable"
        said = str(error) or type(error).__name__
        return ToolError(kind, f"{self._url}: {said}")
