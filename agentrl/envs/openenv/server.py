"""A registered environment behind the protocol of openenv 0.10; `agentrl serve-env` runs it.

    /ws             a session: reset, step, state, mcp, close; `?session_id=ID` attaches to one of `/mcp`
    /mcp            JSON-RPC: tools/list, tools/call, openenv/session/create and close; by POST or WebSocket
    /schema         of actions, observations and the state; also /metadata and /health
    /ENV/splits     the tasks; also /list_environments, /ENV/num_tasks, /ENV/task, /ENV/task_range

For clients of MCP itself `initialize` opens a session and begins an episode, whose prompt is in
`instructions`.
OpenEnv's /reset, /step and /state over HTTP make an environment for each request, in which nothing can be
played; they are left out, as by OpenEnv's own servers in production.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from inspect import getdoc
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from agentrl.engine.served.config import control_key
from agentrl.envs.multi_agent import one_agent_of
from agentrl.envs.openenv.config import ENV_KEY, ServeEnv
from agentrl.envs.openenv.replies import FullError
from agentrl.envs.openenv.rpc import Rpc, RpcCode, error_reply
from agentrl.envs.openenv.sessions import (
    GONE,
    OBSERVATION,
    STATE,
    Body,
    InvalidError,
    ServedSession,
    ServedSessions,
    ServedWorld,
    action_schema,
    read_action,
    unless_gone,
)
from agentrl.envs.registry import find
from agentrl.errors import AgentRLError, EnvCodeError
from agentrl.http.requests import check_values, json_of, off_loop
from agentrl.http.serving import (
    MAX_FRAME_BYTES,
    WAITING_CONNECTIONS,
    BodyReader,
    Endpoint,
    RequestChecks,
    address_of,
    bound,
    cancel,
    host_names,
    serve,
)
from agentrl.runtime.collector import rare_collections
from agentrl.runtime.extras import require
from agentrl.tools import release_shared
from agentrl.types import JSON, Task

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_NORMAL, _GOING_AWAY = 1000, 1001
_MOST_TASKS = 1000
_PART_BYTES = 1 << 13
_SESSION_HEADER = "mcp-session-id"
_Socket = Callable[[WebSocket], Awaitable[None]]
_Answer = Callable[[Mapping[str, JSON]], Awaitable[Body | None]]


def serve_env(id: str, kwargs: Mapping[str, object], own: ServeEnv, *, ready: Callable[[str], None]) -> None:
    """Serve a registered environment until SIGINT, SIGTERM or SIGHUP.

    kwargs: of the environment. ready: called with the address when the server accepts requests.

    Raises:
        UserError: there is no such environment, split or agent; the address or the key cannot be used.
        MissingExtraError: websockets, or what the environment needs, is not installed.
    """
    app = env_application(id, kwargs, own)
    with bound(own.host, own.port) as listener:
        listener.listen(WAITING_CONNECTIONS)
        ready(address_of(listener))
        with rare_collections():
            serve(app, listener, websocket=paced_socket())


def env_application(id: str, kwargs: Mapping[str, object], own: ServeEnv) -> ASGIApp:
    """The application of `serve_env`; see there for the arguments and errors."""
    require("serving an environment", "websockets")
    checks = RequestChecks(host_names(own.host, own.allowed_hosts), control_key(ENV_KEY))
    world = ServedWorld(one_agent_of(find(id).factory(**kwargs), own.agent or None), own.split)
    return application_of(ServedSessions(world, own.max_sessions, own.idle_s), checks)


def application_of(sessions: ServedSessions, checks: RequestChecks) -> ASGIApp:
    """The application. checks: of every request and session; its control key, if it has one, is needed."""
    server, sockets = _Endpoints(sessions, checks), _Sockets(sessions, checks)

    def get(path: str, endpoint: Endpoint) -> Route:
        return Route(path, checks.checked(endpoint, control=server.has_key), methods=["GET"])

    def post(path: str, endpoint: Endpoint) -> Route:
        return Route(path, checks.checked(endpoint, control=server.has_key), methods=["POST"])

    by_path = {"/ws": sockets.guarded(sockets.session), "/mcp": sockets.guarded(sockets.mcp_session)}
    requests = Starlette(
        routes=[
            Route("/health", checks.checked(server.health), methods=["GET"]),
            get("/metadata", server.metadata),
            get("/schema", server.schema),
            get("/list_environments", server.environments),
            get("/{env_name:path}/splits", server.splits),
            post("/{env_name:path}/num_tasks", server.num_tasks),
            post("/{env_name:path}/task", server.task),
            post("/{env_name:path}/task_range", server.task_range),
            post("/mcp", server.mcp),
            Route("/mcp", checks.checked(server.mcp_end, control=server.has_key), methods=["DELETE"]),
        ],
        exception_handlers={HTTPException: _error_reply},
        lifespan=server.lifespan,
    )

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        # Sessions go past the routes and the middleware, through which each message would go.
        if scope["type"] == "websocket" and (socket := by_path.get(scope["path"])):
            await socket(WebSocket(scope, receive, send))
        else:
            await requests(scope, receive, send)

    return application


class _Endpoints:
    def __init__(self, sessions: ServedSessions, checks: RequestChecks) -> None:
        self._sessions, self._world = sessions, sessions.world
        self._bodies = BodyReader(MAX_FRAME_BYTES)
        self._rpc = Rpc(sessions)
        self.has_key = checks.control_key is not None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Ends sessions that rest; at the end all of them, and what their tools share."""
        del app
        watching = asyncio.create_task(self._sessions.watch())
        try:
            yield
        finally:
            await cancel([watching])
            await release_shared()

    async def health(self, request: Request) -> Response:
        del request
        return JSONResponse({"status": "healthy"})

    async def metadata(self, request: Request) -> Response:
        del request
        example = self._world.example
        text = (getdoc(type(example)) or example.id).partition("\n\n")[0]
        version = example.id.rpartition("-v")[2]
        return JSONResponse({"name": example.id, "description": text, "version": version})

    async def schema(self, request: Request) -> Response:
        del request
        action = action_schema(self._world.example.tool_schemas)
        return JSONResponse({"action": action, "observation": OBSERVATION, "state": STATE})

    async def environments(self, request: Request) -> Response:
        del request
        return JSONResponse([self._world.example.id])

    async def splits(self, request: Request) -> Response:
        self._check_name(request)
        kinds = ("train", "validation", "test")
        return JSONResponse(
            [{"name": name, "type": name if name in kinds else kinds[1]} for name in self._world.splits]
        )

    async def num_tasks(self, request: Request) -> Response:
        tasks, _ = await self._tasks(request)
        return JSONResponse({"num_tasks": len(tasks)})

    async def task(self, request: Request) -> Response:
        tasks, asked = await self._tasks(request)
        number = asked.get("index")
        if not isinstance(number, int) or not 0 <= number < len(tasks):
            raise HTTPException(400, "Invalid task index")
        return JSONResponse({"task": _shown(tasks[number], number)})

    async def task_range(self, request: Request) -> Response:
        tasks, asked = await self._tasks(request)
        first, end = asked.get("start"), asked.get("stop")
        first, end = 0 if first is None else first, len(tasks) if end is None else end
        if not isinstance(first, int) or not isinstance(end, int) or not 0 <= first <= end <= len(tasks):
            raise HTTPException(400, "Invalid task index")
        if end - first > _MOST_TASKS:
            raise HTTPException(400, f"A range holds at most {_MOST_TASKS:,} tasks; ask for several.")
        return JSONResponse({"tasks": [_shown(tasks[number], number) for number in range(first, end)]})

    async def mcp(self, request: Request) -> Response:
        """One JSON-RPC request. The session is in its parameters, or in the header of MCP."""
        body = await self._bodies.read(request)
        session = self._sessions.find(request.headers.get(_SESSION_HEADER))
        try:
            asked = await _read(body)
        except ValueError:
            return JSONResponse(error_reply(RpcCode.PARSE, "Parse error", None))
        reply, opened = await self._rpc.answer(asked, session)
        if reply is None:
            return Response(status_code=202)
        return JSONResponse(reply, headers={} if opened is None else {_SESSION_HEADER: opened.id})

    async def _tasks(self, request: Request) -> tuple[list[Task], Mapping[str, JSON]]:
        self._check_name(request)
        try:
            asked = await _read(await self._bodies.read(request))
        except ValueError as error:
            raise HTTPException(400, f"{error}.") from None
        split = asked.get("split")
        if split not in self._world.splits:
            raise HTTPException(400, f"It has the splits {', '.join(self._world.splits)}.")
        return [*self._world.tasks(str(split))], asked

    async def mcp_end(self, request: Request) -> Response:
        """A client of MCP ends its session."""
        session = self._sessions.find(request.headers.get(_SESSION_HEADER))
        if session is None or session.is_attached:
            raise HTTPException(404, "There is no such session.")
        await self._sessions.close(session)
        return Response(status_code=200)

    def _check_name(self, request: Request) -> None:
        if request.path_params["env_name"].lower() != self._world.example.id.lower():
            raise HTTPException(404, f"unknown environment; it is {self._world.example.id}")


class _Sockets:
    """The WebSockets: sessions, and JSON-RPC."""

    def __init__(self, sessions: ServedSessions, checks: RequestChecks) -> None:
        self._sessions, self._checks = sessions, checks
        self._rpc = Rpc(sessions)

    def guarded(self, serve: _Socket) -> _Socket:
        """A WebSocket that is accepted from senders that the checks let through."""

        async def guarded(websocket: WebSocket) -> None:
            try:
                self._checks.check_sender(websocket)
                if self._checks.control_key is not None:
                    self._checks.check_key(websocket)
            except HTTPException as error:
                await websocket.send_denial_response(
                    JSONResponse({"detail": error.detail}, status_code=error.status_code)
                )
                return
            # A client may go at any time, also before it is answered.
            with suppress(WebSocketDisconnect):
                await websocket.accept()
                await serve(websocket)

        return guarded

    async def session(self, websocket: WebSocket) -> None:
        """The session of a WebSocket: messages and their answers, one after the other."""
        asked_id = websocket.query_params.get("session_id")
        try:
            session = self._attached(asked_id) if asked_id else self._sessions.open()
        except FullError as error:
            more: Body = {"active_sessions": len(self._sessions), "max_sessions": self._sessions.most}
            await _refuse(websocket, _failure("CAPACITY_REACHED", str(error), **more))
            return
        except AgentRLError as error:
            await _refuse(websocket, _failure("SESSION_ERROR", str(error)))
            return
        session.is_attached = True
        try:
            code = await self._exchange(websocket, session, partial(self._message, session), _wrong_message)
        finally:
            session.is_attached = False
            # Its place is free before its client hears that it has ended.
            if session.is_leaving or not asked_id:
                await self._sessions.close(session)
        if code is not None:
            await websocket.close(code)

    async def mcp_session(self, websocket: WebSocket) -> None:
        """JSON-RPC over a WebSocket, which has a session."""
        try:
            session = self._sessions.open()
        except FullError as error:
            await _refuse(websocket, error_reply(RpcCode.SERVER, str(error), None))
            return
        session.is_attached = True

        async def answer(asked: Mapping[str, JSON]) -> Body | None:
            reply, _ = await self._rpc.answer(asked, session)
            return reply if reply is not None else {}

        try:
            wrong = partial(error_reply, RpcCode.PARSE, id=None)
            code = await self._exchange(websocket, session, answer, wrong)
        finally:
            await self._sessions.close(session)
        if code is not None:
            await websocket.close(code)

    async def _exchange(
        self, websocket: WebSocket, session: ServedSession, answer: _Answer, wrong: Callable[[str], Body]
    ) -> int | None:
        """Answer messages until the client goes, rests for too long or says that it ends; its work then ends.

        The result is the code to close the WebSocket with; None = it is closed.
        """
        own = asyncio.current_task()
        assert own is not None, "a WebSocket is served in a task"
        arriving = session.arriving = asyncio.create_task(websocket.receive())
        try:
            while (message := await arriving)["type"] != GONE:
                # The next thing that arrives may be that the client is gone.
                arriving = session.arriving = asyncio.create_task(websocket.receive())
                reply = await unless_gone(arriving, _answered(message, answer, wrong))
                session.used_s = time.monotonic()
                if reply is None:
                    return _NORMAL
                if reply:
                    await websocket.send_text(json.dumps(reply))
        except asyncio.CancelledError:
            if not arriving.cancelled() or own.cancelling():
                raise
            return _GOING_AWAY
        else:
            return None
        finally:
            await cancel([arriving])

    async def _message(self, session: ServedSession, message: Mapping[str, JSON]) -> Body | None:
        """The answer to a message of a session; None = it ends."""
        kind, data = message.get("type", ""), message.get("data", {})
        if kind == "close":
            return None
        try:
            if not isinstance(data, dict):
                raise InvalidError([("data", "Input should be a valid dictionary")])
            return await self._done(session, kind, data)
        except InvalidError as error:
            return _failure("VALIDATION_ERROR", "Invalid message", errors=error.errors)
        except EnvCodeError as error:
            return _failure("FACTORY_ERROR", str(error), factory_name=self._sessions.world.example.id)
        except AgentRLError as error:
            return _failure("EXECUTION_ERROR", str(error))

    async def _done(self, session: ServedSession, kind: JSON, data: Mapping[str, JSON]) -> Body:
        match kind:
            case "reset":
                return {"type": "observation", "data": await session.reset(data)}
            case "step":
                return {"type": "observation", "data": await session.step(read_action(data))}
            case "state":
                return {"type": "state", "data": session.state}
            case "mcp":
                reply, _ = await self._rpc.answer(data, session)
                return {"type": "mcp", "data": reply or {}}
        return _failure("UNKNOWN_TYPE", f"Unknown message type: {str(kind)[:40]}")

    def _attached(self, id: str) -> ServedSession:
        session = self._sessions.find(id)
        if session is None:
            raise AgentRLError(f"Unknown session_id: {id[:40]}")
        if session.is_attached:
            raise AgentRLError(f"Session {id} already has an attached WebSocket")
        return session


@lru_cache(maxsize=1)
def paced_socket() -> type[asyncio.Protocol]:
    """A WebSocket that takes what arrives in parts, between which other tasks get their turns.

    Pings are answered where they arrive: 256 KiB of them, which asyncio hands over at once, would hold the
    event loop for a second. While a client does not read the answers, nothing of it is read.
    """
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Paced(WebSocketsSansIOProtocol):
        """See `asyncio.Protocol`."""

        _rest = b""

        def data_received(self, data: bytes) -> None:
            is_waiting, self._rest = bool(self._rest), self._rest + data
            if is_waiting:
                self.transport.pause_reading()
            else:
                self._go_on()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._rest:
                self._go_on()

        async def send(self, message: ASGISendEvent) -> None:
            await super().send(message)
            # A handshake that is refused is answered, which uvicorn takes for an error of the application.
            self.handshake_complete = self.handshake_complete or self.initial_response is not None

        def _go_on(self) -> None:
            if not self.writable.is_set() or self.transport.is_closing():
                # `resume_writing` goes on.
                self.transport.pause_reading()
                return
            part, self._rest = self._rest[:_PART_BYTES], self._rest[_PART_BYTES:]
            super().data_received(part)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                # uvicorn neither answers nor closes what websockets takes for no handshake.
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
                return
            if self._rest:
                self.transport.pause_reading()
                self.loop.call_soon(self._go_on)
            elif not self.read_paused:
                self.transport.resume_reading()

    return Paced


async def _answered(
    message: Mapping[str, object], answer: _Answer, wrong: Callable[[str], Body]
) -> Body | None:
    text = message.get("text")
    try:
        asked = await _read(text.encode() if isinstance(text, str) else b"")
    except ValueError as error:
        return wrong(str(error))
    return await answer(asked)


async def _read(text: bytes) -> Mapping[str, JSON]:
    """The object in a message.

    Raises:
        ValueError: it is none, or holds too many values.
    """
    await check_values(text)
    value = await off_loop(json_of, text)
    if not isinstance(value, dict):
        raise ValueError("the message is no JSON object")
    return value


async def _refuse(websocket: WebSocket, reply: Body) -> None:
    await websocket.send_text(json.dumps(reply))
    await websocket.close()


def _failure(code: str, message: str, **more: JSON) -> Body:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def _wrong_message(reason: str) -> Body:
    return _failure("INVALID_JSON", f"Invalid JSON: {reason}")


def _shown(task: Task, number: int) -> Body:
    """What clients may know of a task: its answer and its metadata are the world's."""
    prompt = "\n".join(message.text for message in task.prompt)
    return {"id": task.id, "index": number, "split": task.split, "prompt": prompt}


async def _error_reply(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    return JSONResponse({"detail": error.detail}, status_code=error.status_code)
