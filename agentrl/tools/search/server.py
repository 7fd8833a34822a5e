"""A server that implements Search-R1's `/retrieve` over an index; `agentrl serve-search` runs it.

Errors are `{"detail": "one sentence"}`: 400 for a body that is not JSON, 413 for one that is too long, 422
for one that is no request. `GET /health` returns the number of passages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.tools.search import wire
from agentrl.tools.search.batching import Batcher
from agentrl.tools.search.index import Hit, SearchIndex, hits_of
from agentrl.tools.search.worker import WorkerThread

_Results: TypeAlias = Sequence[tuple[Hit, ...]]


class RetrieveApp:
    """The ASGI application: `app`. Concurrent requests are batched and run in a thread.

    topk: passages for a query where the request has no `topk`.
    served: how many `requests` were answered, in how many `batches`.
    """

    def __init__(
        self, index: SearchIndex, *, topk: int = wire.DEFAULT_TOPK, bounds: wire.Bounds | None = None
    ) -> None:
        self._index = index
        self._topk = topk
        self._bounds = bounds or wire.Bounds()
        self._batcher: Batcher[wire.RetrieveRequest, _Results] | None = None
        self._worker = WorkerThread("search")
        self.served = {"requests": 0, "batches": 0}
        self.app = Starlette(
            routes=[
                Route(wire.PATH, self._retrieve, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _error_reply},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._batcher = Batcher(self._answer)
        try:
            yield
        finally:
            await self._batcher.close()
            self._worker.close()

    async def _health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok", "passages": len(self._index.corpus)})

    async def _retrieve(self, request: Request) -> Response:
        body = await self._body(request)
        try:
            retrieve = wire.read_request(body, self._bounds, self._topk)
        except ValueError as error:
            raise HTTPException(400, f"{error}.") from None
        except LookupError as error:
            raise HTTPException(422, f"{error.args[0]}.") from None
        assert self._batcher is not None, "requests come after the start"
        hits = await self._batcher.submit(retrieve)
        self.served["requests"] += 1
        return JSONResponse(wire.reply_of(hits, return_scores=retrieve.return_scores))

    async def _body(self, request: Request) -> bytes:
        pieces, length = [], 0
        try:
            async for piece in request.stream():
                pieces.append(piece)
                length += len(piece)
                if length > self._bounds.max_bytes:
                    raise HTTPException(413, f"a request has at most {self._bounds.max_bytes:,} bytes.")
        except ClientDisconnect:
            raise HTTPException(400, "the request broke off.") from None
        return b"".join(pieces)

    async def _answer(self, requests: Sequence[wire.RetrieveRequest]) -> Sequence[_Results]:
        self.served["batches"] += 1
        return await self._worker.call(partial(_answers, self._index, requests))


def _answers(index: SearchIndex, requests: Sequence[wire.RetrieveRequest]) -> list[_Results]:
    """The answers to several requests, one call of the index for each `topk`."""
    by_topk: dict[int, list[int]] = defaultdict(list)
    for number, request in enumerate(requests):
        by_topk[request.topk].append(number)
    answers: dict[int, _Results] = {}
    for topk, numbers in by_topk.items():
        hits = iter(hits_of(index, [query for n in numbers for query in requests[n].queries], topk))
        for number in numbers:
            answers[number] = [next(hits) for _ in requests[number].queries]
    return [answers[number] for number in range(len(requests))]


async def _error_reply(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)
