"""The replies to requests that were refused, or that failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.engine.served import replies
from agentrl.engine.served.requests import RefusedError
from agentrl.errors import EngineError


async def _refused(request: Request, error: Exception) -> Response:
    # An error with a cause is a failure of the engine; without one, the request was invalid.
    status = 500 if error.__cause__ is not None else 400
    return _reply(request, str(error), status, error.code if isinstance(error, RefusedError) else None)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return _reply(request, error.detail, error.status_code)


def _reply(request: Request, sentence: str, status: int, code: str | None = None) -> Response:
    if request.url.path.startswith("/v1/"):
        return JSONResponse(replies.openai_error(sentence, status, code), status)
    return JSONResponse(replies.refusal(sentence), status)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _http,
    RefusedError: _refused,
    EngineError: _refused,
}
"""Of an application: by the error that an endpoint raised."""
