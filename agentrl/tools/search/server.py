"""A server that implements Search-R1's `/retrieve` over an index; `agentrl serve-search` runs it.

Errors are `{"detail": "one sentence"}`: 400 for a body that is not JSON, 413 for one that is too long, 422
for one that is no request, 503 where too many queries of the client wait. `GET /health` returns the number of
passages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.errors import ToolError
from agentrl.http.serving import BodyReader, RequestChecks, json_list, unless_disconnected
from agentrl.tools.search import wire
from agentrl.tools.search.batching import FairQueue
from agentrl.tools.search.dense import DenseIndex
from agentrl.tools.search.index import Hit, SearchIndex, hits_of
from agentrl.tools.search.worker import WorkerThread

_BATCH_S = 0.05
_CLIENT_IS_GONE = 499


class _Query(NamedTuple):
    text: str
    topk: int


_Hits: TypeAlias = tuple[Hit, ...]


class RetrieveApp:
    """The ASGI application: `app`. Queries of all clients take turns, in a thread.

    topk: passages for a query where the request has no `topk`. checks: of every request.
    served: how many `requests` were answered, in how many `batches`.
    """

    def __init__(
        self,
        index: SearchIndex,
        *,
        topk: int = wire.DEFAULT_TOPK,
        bounds: wire.QueryBounds | None = None,
        checks: RequestChecks | None = None,
    ) -> None:
        self._index = index
        self._topk = topk
        self._bounds = bounds or wire.QueryBounds()
        self._bodies = BodyReader(self._bounds.max_bytes)
        self._queue: FairQueue[_Query, _Hits] | None = None
        self._worker = WorkerThread("search")
        self.served = {"requests": 0, "batches": 0}
        checked = (checks or RequestChecks()).checked
        self.app = Starlette(
            routes=[
                Route(wire.PATH, checked(self._retrieve), methods=["POST"]),
                Route("/health", checked(self._health), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _error_reply},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._queue = FairQueue(self._answer)
        try:
            yield
        finally:
            await self._queue.close()
            self._worker.close()

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok", "passages": len(self._index.corpus)})

    async def _retrieve(self, request: Request) -> Response:
        body = await self._bodies.read(request)
        try:
            retrieve = wire.read_request(body, self._bounds, self._topk)
        except ValueError as error:
            raise HTTPException(400, f"{error}.") from None
        except LookupError as error:
            raise HTTPException(422, f"{error.args[0]}.") from None
        assert self._queue is not None, "requests come after the start"
        queries = [_Query(text, retrieve.topk) for text in retrieve.queries]
        client = request.client.host if request.client is not None else ""
        try:
            hits = await unless_disconnected(request, self._queue.submit(client, queries))
        except ToolError:
            raise HTTPException(
                503, "Too many queries of this client wait; send the request again."
            ) from None
        if hits is None:
            return Response(status_code=_CLIENT_IS_GONE)
        self.served["requests"] += 1
        results = await json_list(wire.results_of(hits, return_scores=retrieve.return_scores))
        return Response(b'{"result":' + results + b"}", media_type="application/json")

    async def _answer(self, queries: Sequence[_Query]) -> Sequence[_Hits]:
        self.served["batches"] += 1
        return await self._worker.call(partial(_answers, self._index, queries))


def _answers(index: SearchIndex, queries: Sequence[_Query]) -> list[_Hits]:
    """The answers to the first of several queries: to one, and to more for as long as _BATCH_S.

    An encoder is several times as fast for a batch of queries; other indexes rank them one by one.
    """
    if isinstance(index, DenseIndex):
        return _together(index, queries)
    answers: list[_Hits] = []
    end_s = time.perf_counter() + _BATCH_S
    while len(answers) < len(queries) and (not answers or time.perf_counter() < end_s):
        query = queries[len(answers)]
        (hits,) = hits_of(index, [query.text], query.topk)
        answers.append(hits)
    return answers


def _together(index: SearchIndex, queries: Sequence[_Query]) -> list[_Hits]:
    """The answers to several queries, one call of the index for each `topk`."""
    by_topk: dict[int, list[int]] = defaultdict(list)
    for number, query in enumerate(queries):
        by_topk[query.topk].append(number)
    answers: dict[int, _Hits] = {}
    for topk, numbers in by_topk.items():
        hits = hits_of(index, [queries[number].text for number in numbers], topk)
        answers |= dict(zip(numbers, hits, strict=True))
    return [answers[number] for number in range(len(queries))]


async def _error_reply(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)
