"""The embedded engine behind SGLang's endpoints, as an ASGI application.

A request waits for its completion, and ends early where its client is gone, where /abort_request names it, or
where the engine closes. Sessions are kept apart by the routing key of sglang-router: requests with the same
key, one after the other, use one cache. Wrong requests are answered 400 {"error": {"message": ".."}}.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.checkpoints.loading import open_directory
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served import requests
from agentrl.engine.served.requests import CompletionBatch, CompletionRequest, RefusedError, Words
from agentrl.engine.sglang.wire import ROUTING_KEY
from agentrl.errors import AgentRLError, EngineError, ModelLoadError
from agentrl.protocols import Sampling
from agentrl.types import JSON, Completion
from agentrl.weights import NamedTensors, checksum, deliver, named_weights

_MAX_BODY_BYTES = 64 << 20
_HEALTH_TIMEOUT_S = 20.0
_STREAM_EVERY_S = 0.02
_CLIENT_IS_GONE = 499

_T = TypeVar("_T")


class EngineApp:
    """The ASGI application is `app`; when it ends, it closes the engine.

    words: the tokenizer. name: what the model is called, in the first place its folder.
    max_body_bytes: of a request; a longer one is answered 413.
    """

    def __init__(
        self, engine: EmbeddedEngine, words: Words, *, name: str, max_body_bytes: int = _MAX_BODY_BYTES
    ) -> None:
        self._engine = engine
        self._words = words
        self._name = name
        self._path = name
        self._max_body_bytes = max_body_bytes
        self._sessions: dict[str, str] = {}
        self._updating = asyncio.Lock()
        self._paused = self._emptied = False
        self.app = Starlette(routes=self._routes(), exception_handlers=_HANDLERS, lifespan=self._lifespan)

    def _routes(self) -> list[Route]:
        post: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._rename,
        }
        get = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
        }
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
            Route("/flush_cache", self._flush, methods=["GET", "POST"]),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        try:
            yield
        finally:
            await self._engine.close()

    async def _generate(self, request: Request) -> Response:
        batch = requests.read_generate(await self._body(request), self._words)
        taken = next((one.rid for one in batch.asked if one.rid in self._sessions), None)
        if taken is not None:
            raise RefusedError(f"Duplicate request ID detected: {taken}")
        key = request.headers.get(ROUTING_KEY)
        if batch.stream:
            events = self._events(request, batch, key)
            return StreamingResponse(events, media_type="text/event-stream")
        told = await _unless_gone(request, self._all(batch, key))
        if told is None:
            return Response(status_code=_CLIENT_IS_GONE)
        return JSONResponse(told[0] if batch.alone else told)

    async def _all(self, batch: CompletionBatch, key: str | None) -> list[dict[str, JSON]]:
        started = time.perf_counter()
        tasks = [asyncio.create_task(self._one(asked, key)) for asked in batch.asked]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            await _stop(tasks)
        seconds = time.perf_counter() - started
        return [
            self._reply(asked, done, seconds) for asked, done in zip(batch.asked, completions, strict=True)
        ]

    async def _one(self, asked: CompletionRequest, key: str | None) -> Completion:
        """Run one request in the session of its key, or, where that is busy, in one of its own."""
        kept = key is not None and f"key {key}" not in self._sessions.values()
        session = f"key {key}" if kept else uuid.uuid4().hex
        self._sessions[asked.rid] = session
        try:
            return await self._engine.generate(asked.prompt_ids, asked.sampling, session=session)
        finally:
            del self._sessions[asked.rid]
            if not kept:
                await self._engine.close_session(session)

    async def _events(self, request: Request, batch: CompletionBatch, key: str | None) -> AsyncIterator[str]:
        """Every so often what each completion holds so far, then what it is, then `[DONE]`."""
        started = time.perf_counter()
        tasks = {asyncio.create_task(self._one(asked, key)): n for n, asked in enumerate(batch.asked)}
        left, sent = set(tasks), [0] * len(batch.asked)
        try:
            while left and not await request.is_disconnected():
                done, left = await asyncio.wait(left, timeout=_STREAM_EVERY_S, return_when="FIRST_COMPLETED")
                seconds = time.perf_counter() - started
                for number, told in self._news(batch, [tasks[task] for task in left], sent, seconds):
                    yield _event(told, batch, number)
                for task in done:
                    number = tasks[task]
                    yield _event(await self._ended(task, batch.asked[number], seconds), batch, number)
            yield "data: [DONE]\n\n"
        finally:
            await _stop(list(tasks))

    def _news(
        self, batch: CompletionBatch, numbers: list[int], sent: list[int], seconds: float
    ) -> Iterator[tuple[int, dict[str, JSON]]]:
        """Replies of the completions that have more tokens than were sent; `sent` is brought up to date."""
        for number in sorted(numbers):
            asked = batch.asked[number]
            completion = self._engine.so_far(self._sessions.get(asked.rid, ""))
            if completion is not None and len(completion.token_ids) > sent[number]:
                sent[number] = len(completion.token_ids)
                yield number, self._reply(asked, completion, seconds, ended=False)

    async def _ended(
        self, task: asyncio.Task[Completion], asked: CompletionRequest, seconds: float
    ) -> dict[str, JSON]:
        try:
            return self._reply(asked, await task, seconds)
        except EngineError as error:
            return requests.refusal(str(error))

    def _reply(
        self, asked: CompletionRequest, completion: Completion, seconds: float, *, ended: bool = True
    ) -> dict[str, JSON]:
        version = self._engine.version
        return requests.reply(asked, completion, self._words, version=version, seconds=seconds, ended=ended)

    async def _abort(self, request: Request) -> Response:
        asked = requests.read(requests.AbortRequest, await self._body(request))
        if asked.abort_all:
            await self._engine.abort()
        elif asked.rid:
            ended = [session for rid, session in self._sessions.items() if rid.startswith(asked.rid)]
            for session in ended:
                await self._engine.close_session(session)
        return Response()

    async def _pause(self, request: Request) -> Response:
        mode = requests.read(requests.Pause, await self._body(request)).mode
        self._paused = True
        # What ran has ended then, and what comes waits outside.
        self._emptied = mode == "abort"
        self._engine.pause()
        if mode == "abort":
            await self._engine.abort()
        if mode == "retract":
            self._engine.drop_caches()
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        del request
        self._paused = self._emptied = False
        self._engine.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: Request) -> Response:
        del request
        if self._engine.num_requests and not self._emptied:
            return Response("Flush cache failed: requests run.\n", 400, media_type="text/plain")
        self._engine.drop_caches()
        return Response("Cache flushed.\n", media_type="text/plain")

    async def _update(self, request: Request) -> Response:
        asked = requests.read(requests.Update, await self._body(request))
        async with self._updating:
            version = requests.read_version(asked.weight_version, self._engine.version)
            if asked.abort_all_requests:
                await self._engine.abort()
            try:
                checksum = await update_from_disk(self._engine, asked.model_path, version)
            except (ModelLoadError, EngineError) as error:
                return JSONResponse({"success": False, "message": str(error)}, 400)
            self._path = asked.model_path
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        told = {"success": True, "message": message, "num_paused_requests": 0, "checksum": checksum}
        return JSONResponse(told)

    async def _rename(self, request: Request) -> Response:
        asked = requests.read(requests.Rename, await self._body(request))
        version = requests.read_version(asked.new_version, self._engine.version)
        if asked.abort_all_requests:
            await self._engine.abort()
        self._engine.rename(version)
        message = f"Weight version updated to {version}"
        return JSONResponse({"success": True, "message": message, "new_version": asked.new_version})

    async def _health(self, request: Request) -> Response:
        del request
        return Response()

    async def _health_generate(self, request: Request) -> Response:
        """200 where a token comes, or where none should: the engine is paused."""
        del request
        session = f"health {uuid.uuid4().hex}"
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                if not self._paused:
                    await self._engine.generate([0], Sampling(1), session=session)
        except (TimeoutError, AgentRLError) as error:
            said = str(error) or "no token came in time."
            return JSONResponse(requests.refusal(said), 503)
        await self._engine.close_session(session)
        return Response()

    async def _model_info(self, request: Request) -> Response:
        del request
        told = {
            "model_path": self._path,
            "tokenizer_path": self._name,
            "served_model_name": self._name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(self._engine.version),
        }
        return JSONResponse(told)

    async def _server_info(self, request: Request) -> Response:
        del request
        told = {
            "model_path": self._path,
            "tokenizer_path": self._name,
            "served_model_name": self._name,
            "weight_version": str(self._engine.version),
            "context_length": self._engine.max_context_len,
            "max_running_requests": self._engine.max_slots,
            "num_requests": self._engine.num_requests,
            "tp_size": 1,
            "dp_size": 1,
        }
        return JSONResponse(told)

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

    async def _body(self, request: Request) -> bytes:
        pieces, length = [], 0
        try:
            async for piece in request.stream():
                pieces.append(piece)
                length += len(piece)
                if length > self._max_body_bytes:
                    raise HTTPException(413, f"A request has at most {self._max_body_bytes:,} bytes.")
        except ClientDisconnect:
            raise RefusedError("The request broke off.") from None
        return b"".join(pieces)


async def _unless_gone(request: Request, work: Coroutine[None, None, _T]) -> _T | None:
    """What the work gives, or None where the client went away before; the work is cancelled then."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when="FIRST_COMPLETED")
        return await working if working.done() else None
    finally:
        await _stop([working, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stop(tasks: list[asyncio.Task[_T]] | list[asyncio.Task[_T] | asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _event(told: dict[str, JSON], batch: CompletionBatch, number: int) -> str:
    marked = told if batch.alone else {**told, "index": number}
    return f"data: {json.dumps(marked, ensure_ascii=False)}\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    del request
    # A request that the engine would not begin with is the client's; what broke in it has a cause.
    failed = error.__cause__ is not None
    return JSONResponse(requests.refusal(str(error)), 500 if failed else 400)


async def _http(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "it handles nothing else"
    return JSONResponse(requests.refusal(error.detail), error.status_code)


_HANDLERS = {HTTPException: _http, RefusedError: _refused, EngineError: _refused}


async def update_from_disk(engine: EmbeddedEngine, directory: str, version: int) -> int:
    """Serve the weights of a directory as `version`; requests that run go on with them. Gives their checksum.

    Raises:
        ModelLoadError: the directory is missing or broken.
        EngineError: it holds another model; the old weights serve on.
    """
    named, told = await asyncio.to_thread(_loaded, directory)
    await deliver(named, engine.sink, version)
    return told


def _loaded(directory: str) -> tuple[list[tuple[str, torch.Tensor]], int]:
    named: NamedTensors = named_weights(open_directory(directory, torch.float32))
    listed = list(named)
    return listed, checksum(listed)
