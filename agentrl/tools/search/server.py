"""A server that speaks Search-R1's `/retrieve` over an index; `agentrl serve-search` runs it.

Errors are `{"detail": "one sentence"}`: 400 for what is not JSON, 413 for what is too long, 422 for what is
no request. `GET /health` says how many passages there are.
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
from agentrl.tools.search.index import Hit, SearchIndex, found
from agentrl.tools.search.worker import WorkerThread

_Found: TypeAlias = Sequence[tuple[Hit, ...]]


class RetrieveApp:
    """The ASGI application: `app`. Concurrent requests are done together, in a thread.

    topk: passages for a query where the request does not say.
    served: how many `requests` were answered, in how many `batches`.
    """

    def __init__(
        self, index: SearchIndex, *, topk: int = wire.DEFAULT_TOPK, bounds: wire.Bounds | None = None
    ) -> None:
        self._index = index
        self._topk = topk
        self._bounds = bounds or wire.Bounds()
        self._batcher: Batcher[wire.RetrieveRequest, _Found] | None = None
        self._worker = WorkerThread("search")
        self.served = {"requests": 0, "batches": 0}
        self.app = Starlette(
            routes=[
                Route(wire.PATH, self._retrieve, methods=["POST"]),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _told},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        self._batcher = Batcher(self._answered)
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
            asked = wire.read_request(body, self._bounds, self._topk)
        except ValueError as error:
            raise HTTPException(400, f"{error}.") from None
        except LookupError as error:
            raise HTTPException(422, f"{error.args[0]}.") from None
        assert self._batcher is not None, "requests come after the start"
        hits = await self._batcher.ask(asked)
        self.served["requests"] += 1
        return JSONResponse(wire.answered(hits, return_scores=asked.return_scores))

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

    async def _answered(self, several: Sequence[wire.RetrieveRequest]) -> Sequence[_Found]:
        self.served["batches"] += 1
        return await self._worker.call(partial(_all_found, self._index, several))


def _all_found(index: SearchIndex, several: Sequence[wire.RetrieveRequest]) -> list[_Found]:
    """The answers to several requests, one call of the index for each `topk`."""
    by_topk: dict[int, list[int]] = defaultdict(list)
    for place, asked in enumerate(several):
        by_topk[asked.topk].append(place)
    answers: dict[int, _Found] = {}
    for topk, places in by_topk.items():
        hits = iter(found(index, [query for place in places for query in several[place].queries], topk))
        for place in places:
            answers[place] = [next(hits) for _ in several[place].queries]
    return [answers[place] for place in range(len(several))]


async def _told(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "it handles nothing else"
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)
