"""The embedded engine behind SGLang's endpoints, and OpenAI's for chat, as an ASGI application.

A request waits for its completion. It ends early where its client disconnects, where /abort_request names
it, or where the engine closes. The routing key of sglang-router identifies a session: sequential requests
with the same key, and the same salt (`extra_key`), use one cache. The response to an invalid request is
400 {"error": {"message": ".."}}; a request is checked before the engine gets a part of it. What acts on the
weights, or on requests of other clients, needs the control key.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served import replies, requests
from agentrl.engine.served.chat import ChatCompletions
from agentrl.engine.served.completions import Completions
from agentrl.engine.served.control import EngineControl
from agentrl.engine.served.pending import Client
from agentrl.engine.served.replies import Answer
from agentrl.engine.served.requests import (
    CompletionBatch,
    CompletionRequest,
    RefusedError,
    RequestLimits,
    TextCodec,
)
from agentrl.errors import AgentRLError, EngineError
from agentrl.http.serving import BodyReader, Endpoint, RequestChecks, json_list, unless_disconnected
from agentrl.tools import release_shared
from agentrl.types import JSON
from agentrl.types.seams import EpisodeRenderer, Sampling


# The replies to requests that were refused, or that failed.
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


_MAX_BODY_BYTES = 1 << 20
_BODY_BYTES_OF_TOKEN = 32
_HEALTH_TIMEOUT_S = 20.0
_CLIENT_IS_GONE = 499


class EngineApp:
    """The ASGI application is `app`; when it ends, it closes the engine.

    codec: the tokenizer. name: of the model; the path of the weights until they are updated.
    renderer: of the model's chat template; None = it has none, and chat requests are refused.
    checks: of every request; without a control key in them, control requests are refused.
    max_body_bytes: of a request; the response to a longer one is 413. None = 1 MiB, and 32 bytes for each
        token of the longest request.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        codec: TextCodec,
        *,
        name: str,
        renderer: EpisodeRenderer | None = None,
        checks: RequestChecks | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._name = name
        self._checks = checks or RequestChecks()
        self._limits = RequestLimits(engine.vocab_size, engine.max_context_len, engine.expert_layers)
        default_bytes = _MAX_BODY_BYTES + _BODY_BYTES_OF_TOKEN * engine.max_context_len
        self._bodies = BodyReader(default_bytes if max_body_bytes is None else max_body_bytes)
        self._probe: asyncio.Task[str | None] | None = None
        self._completions = Completions(engine)
        self._chat = ChatCompletions(
            self._completions, renderer, codec, name=name, limits=self._limits, bodies=self._bodies
        )
        self._control = EngineControl(engine, self._bodies, name)
        self.app = Starlette(routes=self._routes(), exception_handlers=HANDLERS, lifespan=self._lifespan)

    def _routes(self) -> list[Route]:
        post: dict[str, Endpoint] = {
            "/generate": self._generate,
            "/v1/chat/completions": self._chat.reply,
            "/abort_request": self._abort,
        }
        get: dict[str, Endpoint] = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
        }
        checked = self._checks.checked
        return [
            *(Route(path, checked(endpoint), methods=["POST"]) for path, endpoint in post.items()),
            *(
                Route(path, checked(endpoint, control=True), methods=["POST"])
                for path, endpoint in self._control.endpoints.items()
            ),
            *(Route(path, checked(endpoint), methods=["GET"]) for path, endpoint in get.items()),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        try:
            yield
        finally:
            await self._engine.close()
            await release_shared()

    async def _generate(self, request: Request) -> Response:
        batch = await requests.read_generate(await self._bodies.read(request), self._codec, self._limits)
        client = Client.of(request)
        self._completions.pending.check(client, batch.requests)
        if batch.stream:
            events = self._events(request, batch, client)
            return StreamingResponse(events, media_type="text/event-stream")
        completed = await unless_disconnected(request, self._completions.all(batch.requests, client))
        if completed is None:
            return Response(status_code=_CLIENT_IS_GONE)
        answers, seconds = completed
        bodies = (
            self._reply(item, answer, seconds) for item, answer in zip(batch.requests, answers, strict=True)
        )
        if batch.single:
            return JSONResponse(next(bodies))
        return Response(await json_list(bodies), media_type="application/json")

    async def _events(self, request: Request, batch: CompletionBatch, client: Client) -> AsyncIterator[str]:
        """Server-sent events: partial replies at intervals, the final reply of each request, `[DONE]`."""
        started = time.perf_counter()

        async def event(number: int, answer: Answer | EngineError, ended: bool) -> str:
            if isinstance(answer, EngineError):
                return _event(replies.refusal(str(answer)), batch, number)
            seconds = time.perf_counter() - started
            return _event(self._reply(batch.requests[number], answer, seconds, ended=ended), batch, number)

        async for text in self._completions.events(request, batch.requests, client, event):
            yield text
        yield "data: [DONE]\n\n"

    def _reply(
        self, item: CompletionRequest, answer: Answer, seconds: float, *, ended: bool = True
    ) -> dict[str, JSON]:
        version = self._engine.version
        return replies.reply(item, answer, self._codec, version=version, seconds=seconds, ended=ended)

    async def _abort(self, request: Request) -> Response:
        """End requests. Another client's rid is unknown to a client, and must not be reached by a prefix."""
        abort = requests.read(requests.AbortRequest, await self._bodies.read(request))
        if abort.abort_all:
            self._checks.check_key(request)
            await self._engine.abort()
        elif abort.rid:
            is_meant = abort.begins if self._checks.has_key(request) else abort.names
            pending = self._completions.pending.sessions.items()
            for session in [session for rid, session in pending if is_meant(rid)]:
                await self._engine.close_session(session)
        return Response()

    async def _health(self, request: Request) -> Response:
        del request
        return Response()

    async def _health_generate(self, request: Request) -> Response:
        """200 where the engine samples a token, or is paused. Checks at the same time share a sample."""
        del request
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._sample_token())
        failure = await asyncio.shield(self._probe)
        return Response() if failure is None else JSONResponse(replies.refusal(failure), 503)

    async def _sample_token(self) -> str | None:
        """Sample a token; returns the reason of a failure."""
        session = f"health {uuid.uuid4().hex}"
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                if not (self._control.is_paused or self._engine.memory.is_missing):
                    await self._engine.generate([0], Sampling(1), session=session)
        except (TimeoutError, AgentRLError) as error:
            return str(error) or "no token came in time."
        await self._engine.close_session(session)
        return None

    async def _model_info(self, request: Request) -> Response:
        del request
        info = {
            "model_path": self._control.path,
            "tokenizer_path": self._name,
            "served_model_name": self._name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(self._engine.version),
        }
        return JSONResponse(info)

    async def _server_info(self, request: Request) -> Response:
        del request
        info = {
            "model_path": self._control.path,
            "tokenizer_path": self._name,
            "served_model_name": self._name,
            "weight_version": str(self._engine.version),
            "context_length": self._engine.max_context_len,
            "max_running_requests": self._engine.max_slots,
            "num_requests": self._engine.num_requests,
            "tp_size": 1,
            "dp_size": 1,
        }
        return JSONResponse(info)

    async def _loads(self, request: Request) -> Response:
        del request
        engine = self._engine
        num_waiting, num_tokens = engine.scheduler.load
        load = {
            "dp_rank": 0,
            "num_running_reqs": engine.num_requests - num_waiting,
            "num_waiting_reqs": num_waiting,
            "token_usage": num_tokens / (engine.max_slots * engine.max_context_len),
            "max_running_requests": engine.max_slots,
        }
        return JSONResponse({"loads": [load]})

    async def _models(self, request: Request) -> Response:
        del request
        card = {
            "id": self._name,
            "object": "model",
            "owned_by": "agentrl",
            "root": self._name,
            "parent": None,
            "max_model_len": self._engine.max_context_len,
        }
        return JSONResponse({"object": "list", "data": [card]})


def _event(reply: dict[str, JSON], batch: CompletionBatch, number: int) -> str:
    event = reply if batch.single else {**reply, "index": number}
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
