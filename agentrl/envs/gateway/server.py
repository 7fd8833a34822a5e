"""The endpoints of running episodes: one server of a process, and a door for each episode.

    http://127.0.0.1:PORT/EPISODE/v1/chat/completions       OpenAI, also /v1/responses and /v1/models
    http://127.0.0.1:PORT/EPISODE/v1/messages               Anthropic, also /v1/messages/count_tokens

Each door has a key of its own, and both end with the episode. Whoever knows no key learns nothing, not even
which episodes there are. Errors are in the form of the protocol that they answer.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from itertools import count
from typing import Protocol, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.engine.served.chat_replies import Body
from agentrl.engine.served.replies import openai_error
from agentrl.engine.served.requests import RefusedError
from agentrl.envs.gateway.anthropic_messages import (
    MessagesEvents,
    messages_error,
    messages_reply,
    read_messages,
)
from agentrl.envs.gateway.openai_chat import (
    ChatEvents,
    ReplyEvents,
    WireRequest,
    check_calls,
    fields_of,
    read_request,
    whole_reply,
)
from agentrl.envs.gateway.openai_responses import ResponsesEvents, new_id, read_responses, responses_reply
from agentrl.envs.gateway.recording import Answered, Growing, ModelRequest
from agentrl.envs.generate import EpisodeEndedError
from agentrl.errors import StageError
from agentrl.http.requests import MAX_VALUES, check_values, off_loop
from agentrl.http.serving import (
    BodyReader,
    Endpoint,
    RequestChecks,
    address_of,
    bound,
    cancel,
    server_of,
    unless_disconnected,
)
from agentrl.tools import Shared
from agentrl.types import JSON

_MAX_BODY_BYTES = 8 << 20
_MOST_PENDING = 256
_MOST_RESPONSES = 1000
_MAX_NAME_CHARS = 60
_MOST_REASON_CHARS = 300
_CLIENT_IS_GONE = 499
_MODEL = "policy"
_ANTHROPIC = ("/messages", "/count_tokens")
_NO_KEY = "There is no such episode, or this is not its key."
_ENDED = "The episode has ended."
_FAILED = "The policy has failed, and with it the episode."
_EVENTS = "text/event-stream"
# A stream takes a fifth of the event loop's time at most.
_STREAM_PAUSE = 4
_T = TypeVar("_T")


class Responder(Protocol):
    """Replies to the requests of one episode."""

    async def answers(self, asked: ModelRequest, growing: Growing | None = None) -> list[Answered]:
        """The replies to a request. growing: shows a single one before."""

    async def num_tokens(self, asked: ModelRequest) -> int:
        """The tokens of a request (count)."""


class Door:
    """The endpoints of one episode.

    address: of the server; "" = it is not known yet. context: that of the episode, in which its requests are
    answered, so that its clocks stop where they wait. failure: why the policy has not answered. tells_why: a
    client is told that; one that plays for a score is not.
    """

    def __init__(self, name: str, responder: Responder, address: str, *, tells_why: bool = False) -> None:
        self.name, self.address, self.tells_why = name, address, tells_why
        self.key = secrets.token_urlsafe(32)
        self.context: Context = copy_context()
        self.failure: BaseException | None = None
        self.is_failing = asyncio.Event()
        self.items: dict[str, Sequence[JSON]] = {}
        self._responder = responder
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_open = True
        self._used_s = time.monotonic()

    @property
    def base_url(self) -> str:
        """For clients of OpenAI; those of Anthropic leave out its last part, `/v1`."""
        return f"{self.address}/{self.name}/v1"

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables by which clients find it."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.key,
        }

    @property
    def rests_s(self) -> float:
        """How long no request of it has waited (seconds)."""
        return 0.0 if self._tasks else time.monotonic() - self._used_s

    async def answers(self, asked: ModelRequest, growing: Growing | None = None) -> list[Answered]:
        """The replies to a request. growing: shows a single one before.

        Raises:
            RefusedError: the request is refused.
            HTTPException: 429, too many wait; 503, the episode has ended; 500, the policy has failed.
        """
        return await self._result(self._responder.answers(asked, growing))

    async def num_tokens(self, asked: ModelRequest) -> int:
        """The tokens of a request (count); errors are those of `answers`."""
        return await self._result(self._responder.num_tokens(asked))

    async def close(self) -> None:
        """End all requests in flight; later ones find no episode."""
        self._is_open = False
        await cancel([*self._tasks])

    async def _result(self, work: Coroutine[None, None, _T]) -> _T:
        if len(self._tasks) >= _MOST_PENDING or not self._is_open:
            work.close()
            if self._is_open:
                raise HTTPException(429, f"{_MOST_PENDING} requests of this episode wait; send it again.")
            raise self._ended()
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        self._tasks.add(task)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._tasks.discard(task)
            self._used_s = time.monotonic()
        if task.cancelled():
            raise self._ended()
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, RefusedError):
            raise error
        if not isinstance(error, EpisodeEndedError):
            self.failure = self.failure or error
        self.is_failing.set()
        raise self._ended()

    def _ended(self) -> HTTPException:
        if self.failure is None:
            return HTTPException(503, _ENDED)
        # Only these have a sentence for others.
        if not self.tells_why or not isinstance(self.failure, StageError):
            return HTTPException(500, _FAILED)
        return HTTPException(500, f"{_FAILED} {' '.join(self.failure.detail.split())[:_MOST_REASON_CHARS]}")


class Gateway:
    """The doors of all episodes of an event loop, and the application behind their address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._doors: dict[str, Door] = {}
        self._numbers = count(1)
        self.app = application_of(by_key(self._doors))

    @asynccontextmanager
    async def opened(self, episode_id: str, responder: Responder) -> AsyncIterator[Door]:
        """The door of an episode, open during the block.

        episode_id: part of its path. Runs may play episodes of one id at the same time, so it has a number,
        too.
        """
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", episode_id)[:_MAX_NAME_CHARS]
        door = Door(f"{readable}-{next(self._numbers)}", responder, self.address)
        self._doors[door.name] = door
        try:
            yield door
        finally:
            del self._doors[door.name]
            await door.close()


@asynccontextmanager
async def served(app: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    """An application, served at a socket during the block."""
    server = server_of(app, has_lifespan=False)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.001)
        yield
    finally:
        # Whoever is still connected belongs to an episode that has ended.
        server.should_exit = server.force_exit = True
        await asyncio.wait([task])


@asynccontextmanager
async def _gateway() -> AsyncIterator[Gateway]:
    with bound("127.0.0.1", 0) as listener:
        gateway = Gateway(address_of(listener))
        async with served(gateway.app, listener):
            yield gateway


GATEWAY = Shared(_gateway, "gateway")
"""That of the event loop: opened with the first episode that needs it."""


Find: TypeAlias = Callable[[HttpRequest], Awaitable[Door]]
"""The door that a request is for. It raises an HTTPException where there is none."""


def by_key(doors: Mapping[str, Door]) -> Find:
    """Finds one of some doors by the name in the path of a request, which has to have its key."""

    async def found(request: HttpRequest) -> Door:
        door = doors.get(request.path_params["episode"])
        # An unknown episode takes as long as a wrong key.
        key = secrets.token_urlsafe(32) if door is None else door.key
        is_key = hmac.compare_digest(key_of(request).encode("latin-1", "replace"), key.encode())
        if door is None or not is_key:
            raise HTTPException(401, _NO_KEY)
        return door

    return found


def key_of(request: HttpRequest) -> str:
    """The key that a client sends; "" = none."""
    bearer = request.headers.get("authorization", "")
    return request.headers.get("x-api-key") or bearer.removeprefix("Bearer ")


def application_of(
    find: Find, *, bases: Sequence[str] = ("/{episode}",), checks: RequestChecks | None = None
) -> Starlette:
    """The application for the doors that `find` knows. bases: of the paths, before `/v1`."""
    endpoints = _Endpoints(find)
    checked = (checks or RequestChecks()).checked
    post: Mapping[str, Endpoint] = {
        "/chat/completions": endpoints.chat,
        "/responses": endpoints.responses,
        "/messages": endpoints.messages,
        "/messages/count_tokens": endpoints.count_tokens,
    }
    paths = [*((path, endpoint, "POST") for path, endpoint in post.items())]
    paths += [(path, endpoints.models, "GET") for path in ("/models", "/models/{model:path}")]
    routes = [
        Route(f"{base}/v1{path}", checked(endpoint), methods=[method])
        for base in bases
        for path, endpoint, method in paths
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, RefusedError: _refused})


class _Endpoints:
    def __init__(self, find: Find) -> None:
        self._find = find
        self._bodies = BodyReader(_MAX_BODY_BYTES)

    async def chat(self, request: HttpRequest) -> Response:
        door, body = await self._read(request)
        read = await off_loop(lambda text: read_request(fields_of(text)), body)
        return await self._replied(request, door, read, partial(whole_reply, read), ChatEvents(read))

    async def messages(self, request: HttpRequest) -> Response:
        door, body = await self._read(request)
        read = await off_loop(lambda text: read_messages(fields_of(text)), body)
        return await self._replied(request, door, read, partial(messages_reply, read), MessagesEvents(read))

    async def responses(self, request: HttpRequest) -> Response:
        door, body = await self._read(request)
        read, items = await off_loop(lambda text: read_responses(fields_of(text), door.items), body)

        id = new_id()

        def whole(answers: Sequence[Answered]) -> Body:
            reply = responses_reply(read, answers, id)
            output = reply["output"]
            if len(door.items) < _MOST_RESPONSES:
                door.items[id] = [*items, *(output if isinstance(output, list) else ())]
            return reply

        return await self._replied(request, door, read, whole, ResponsesEvents(read, id, whole))

    async def count_tokens(self, request: HttpRequest) -> Response:
        door, body = await self._read(request)
        read = await off_loop(lambda text: read_messages(fields_of(text), counts_only=True), body)
        number = await unless_disconnected(request, door.num_tokens(read.asked))
        if number is None:
            return Response(status_code=_CLIENT_IS_GONE)
        return JSONResponse({"input_tokens": number})

    async def models(self, request: HttpRequest) -> Response:
        """The one model, in the forms of both protocols."""
        await self._find(request)
        name = request.path_params.get("model", _MODEL)
        model: Body = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        if "model" in request.path_params:
            return JSONResponse(model)
        more: Body = {"has_more": False, "first_id": name, "last_id": name}
        return JSONResponse({"object": "list", "data": [model], **more})

    async def _read(self, request: HttpRequest) -> tuple[Door, bytes]:
        door = await self._find(request)
        body = await self._bodies.read(request)
        try:
            await check_values(body)
        except ValueError:
            raise HTTPException(413, f"A body holds at most {MAX_VALUES:,} values.") from None
        return door, body

    async def _replied(
        self,
        request: HttpRequest,
        door: Door,
        read: WireRequest,
        whole: Callable[[Sequence[Answered]], Body],
        events: ReplyEvents,
    ) -> Response:
        if read.grows:
            return await _streamed(request, door, read.asked, events)
        answers = await unless_disconnected(request, door.answers(read.asked))
        if answers is None:
            return Response(status_code=_CLIENT_IS_GONE)
        check_calls(read.asked, answers)
        if read.stream:
            return Response("".join(events.end(answers)), media_type=_EVENTS)
        return JSONResponse(whole(answers))


async def _streamed(request: HttpRequest, door: Door, asked: ModelRequest, events: ReplyEvents) -> Response:
    """A stream, once it begins: before, an error is a reply of its own."""
    parts = _parts(request, door, asked, events)

    async def first() -> str:
        return await anext(parts)

    begins = await unless_disconnected(request, first())
    if begins is None:
        return Response(status_code=_CLIENT_IS_GONE)

    async def whole() -> AsyncIterator[str]:
        yield begins
        async for part in parts:
            yield part

    return StreamingResponse(whole(), media_type=_EVENTS)


async def _parts(
    request: HttpRequest, door: Door, asked: ModelRequest, events: ReplyEvents
) -> AsyncGenerator[str]:
    """The events of a reply: of each growth, then of its end.

    Raises:
        RefusedError, HTTPException: as of `Door.answers`, before the first event.
    """
    growing, has_begun = Growing(), False
    answering = asyncio.create_task(door.answers(asked, growing))
    try:
        while await growing.grows_before(answering) and not (has_begun and await request.is_disconnected()):
            began_s = time.perf_counter()
            text = "".join(events.more(await growing.turn(), growing.num_prompt_tokens))
            used_s = time.perf_counter() - began_s
            if text:
                has_begun = True
                yield text
            # Reading it again and again takes a bounded part of the event loop.
            await asyncio.wait([answering], timeout=_STREAM_PAUSE * used_s)
        if answering.done():
            yield _ending(answering, events, has_begun=has_begun)
    finally:
        await cancel([answering])


def _ending(answering: asyncio.Task[list[Answered]], events: ReplyEvents, *, has_begun: bool) -> str:
    """The last events of a stream."""
    try:
        return "".join(events.end(answering.result()))
    except HTTPException as error:
        if not has_begun:
            raise
        return events.error(error.detail, error.status_code, None)
    except RefusedError as error:
        if not has_begun:
            raise
        return events.error(str(error), 400, error.code)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return _error(request, error.detail, error.status_code, None)


async def _refused(request: HttpRequest, error: Exception) -> Response:
    return _error(request, str(error), 400, error.code if isinstance(error, RefusedError) else None)


def _error(request: HttpRequest, sentence: str, status: int, code: str | None) -> Response:
    """An error in the protocol of the address that was asked."""
    is_anthropic = request.url.path.endswith(_ANTHROPIC)
    body = messages_error(sentence, status) if is_anthropic else openai_error(sentence, status, code)
    return JSONResponse(body, status)
