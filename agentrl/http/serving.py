"""Serving an ASGI application over HTTP: the socket, the checks and bounds of requests, a clean shutdown.

A socket is bound before anything is loaded. A connection whose request does not arrive is closed, connections
stay below the limit of open files, and the log is bounded: a client cannot take the server from the others.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import TypeAlias, TypeGuard, TypeVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.errors import UserError

_T = TypeVar("_T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

WAITING_CONNECTIONS = 2048
MAX_FRAME_BYTES = 1 << 20
"""Of a message of a WebSocket to a server here."""
_LAST_REQUESTS_S = 5
# asyncio accepts so many connections before it serves one: the files for them must be free.
_ACCEPTED_AT_ONCE = 64
_HANDSHAKES_AT_ONCE = 64
_FREE_FILES = 256
_MOST_CONNECTIONS = 1 << 16
_HEAD_TIMEOUT_S = 20.0
_BODY_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 120.0
_MAX_ARRIVING_BYTES = 256 << 20
_LOG_RECORDS = 20
_LOG_INTERVAL_S = 60.0
_LOGGERS = ("asyncio", "uvicorn.error")
_HEAD_END, _UPGRADE = b"\r\n\r\n", b"\r\nupgrade: websocket\r\n"
_FIELD_NAME = re.compile(rb"(?m)^[^:\r\n]+:")
_SAFE_METHODS = ("GET", "HEAD")
_OWN_PAGES = ("same-origin", "none")
_MAX_EXCERPT_CHARS = 80


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address and does not listen yet. port: 0 = any free port.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is explicit: asyncio sets TCP_NODELAY only on sockets whose protocol is IPPROTO_TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(f"Port {port} of {host} cannot be used: {error.strerror}; choose another.") from error
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Refuses requests that a web page may have sent, and control requests without the key.

    A page in a browser on this machine can send requests to loopback addresses, and its owner can resolve a
    name to one (DNS rebinding). So a request must have:

    - a Host that is a loopback name or address, the address that it arrived at, or one of `names`;
    - no Origin and no Sec-Fetch-Site, which browsers set, of another site;
    - unless it is a GET, the content type application/json, which a page of another site cannot send.

    names: further hosts by which clients address the server, in lower case.
    control_key: a control request has it as `Authorization: Bearer KEY`; None = all of them are refused.
    """

    names: frozenset[str] = frozenset()
    control_key: str | None = field(default=None, repr=False)

    def checked(self, endpoint: Endpoint, *, control: bool = False) -> Endpoint:
        """The endpoint behind the checks. control: behind the key, too.

        A request raises:
            HTTPException: 403 (Host, Origin), 415 (no JSON), 401 or 403 (key).
        """

        async def checked(request: Request) -> Response:
            self.check_sender(request)
            _check_json(request)
            if control:
                self.check_key(request)
            return await endpoint(request)

        return checked

    def has_key(self, request: HTTPConnection) -> bool:
        """Whether a request has the control key."""
        credentials = request.headers.get("authorization", "").encode("latin-1", "replace")
        expected = f"Bearer {self.control_key}".encode()
        return self.control_key is not None and hmac.compare_digest(credentials, expected)

    def check_key(self, request: HTTPConnection) -> None:
        """Check that a request, or the handshake of a WebSocket, has the control key.

        Raises:
            HTTPException: 403, the server has no key; 401, the request has none, or another one.
        """
        if self.control_key is None:
            raise HTTPException(
                403, "Control requests are off: this server was started without a control key."
            )
        if not self.has_key(request):
            raise HTTPException(
                401, "A control request needs the header `Authorization: Bearer CONTROL_KEY`."
            )

    def check_sender(self, request: HTTPConnection) -> None:
        """Check the Host and the origin of a request, or of the handshake of a WebSocket.

        Raises:
            HTTPException: 403.
        """
        host = request.headers.get("host", "")
        if not self._is_own(host, request):
            raise HTTPException(
                403,
                f"Host {host[:_MAX_EXCERPT_CHARS]!r} is no address of this server; send requests to its own "
                "address, or start it with that name in --allowed-hosts.",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise HTTPException(403, "This server takes no requests from web pages of another origin.")
        if request.headers.get("sec-fetch-site", "none") not in _OWN_PAGES:
            raise HTTPException(403, "This server takes no requests from web pages of another site.")

    def _is_own(self, host_header: str, request: HTTPConnection) -> bool:
        host = _host_of(host_header)
        if host is None:
            return False
        if host == "localhost" or host in self.names:
            return True
        address = _ip_address(host)
        server = request.scope.get("server") or ("", None)
        return address is not None and (address.is_loopback or address == _ip_address(str(server[0])))


def _check_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method not in _SAFE_METHODS and content_type != "application/json":
        raise HTTPException(415, "Send a JSON body with the header `Content-Type: application/json`.")


def host_names(host: str, allowed_hosts: str) -> frozenset[str]:
    """The names of a server for RequestChecks: of the address that it listens at, and those of a setting.

    allowed_hosts: names, separated by commas.
    """
    names = {name.strip().lower() for name in allowed_hosts.split(",")}
    if _ip_address(host) is None:
        names.add(host.lower())
    return frozenset(names - {""})


def _host_of(header: str) -> str | None:
    """The host of a Host header, in lower case and without the port; None where it is none."""
    if any(character in header for character in "@/?#\\"):
        return None
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is; IPv4 where it is an IPv4 address in IPv6's notation."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@dataclass(slots=True)
class BodyReader:
    """Reads the bodies of requests within bounds: of one, and of all that are arriving.

    max_bytes: of one body.
    """

    max_bytes: int
    _arriving: int = field(default=0, init=False)

    async def read(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            HTTPException: 413, it is too long; 408, it was not sent in time; 503, too much is arriving; 400,
                the client closed the connection.
        """
        chunks, length = [], 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    length += len(chunk)
                    self._arriving += len(chunk)
                    if length > self.max_bytes:
                        raise HTTPException(413, f"A request has at most {self.max_bytes:,} bytes.")
                    if self._arriving > _MAX_ARRIVING_BYTES:
                        raise HTTPException(503, "Too many bodies arrive at once; send the request again.")
        except TimeoutError:
            raise HTTPException(408, f"The body did not arrive in {_BODY_TIMEOUT_S:g} s.") from None
        except ClientDisconnect:
            raise HTTPException(400, "The client closed the connection.") from None
        finally:
            self._arriving -= length
        return b"".join(chunks)


async def json_list(items: Iterable[object]) -> bytes:
    """A JSON array, encoded item by item: between two of them the event loop runs."""
    encoded = []
    for item in items:
        encoded.append(bytes(JSONResponse(item).body))
        await asyncio.sleep(0)
    return b"[" + b",".join(encoded) + b"]"


async def unless_disconnected(request: Request, work: Coroutine[None, None, _T]) -> _T | None:
    """The result of the work, or None where the client disconnects first and the work is cancelled.

    The body of the request has been read.
    """
    task = asyncio.create_task(work)
    disconnected = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when="FIRST_COMPLETED")
        return await task if task.done() else None
    finally:
        await cancel([task, disconnected])


async def cancel(tasks: Sequence[asyncio.Task[_T] | asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def serve(app: ASGIApp, listener: socket.socket, *, websocket: type[asyncio.Protocol] | None = None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; requests in flight then have 5 s to finish.

    A SIGHUP that is ignored, as under `nohup`, stays so. websocket: see `server_of`.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(server_of(app, websocket=websocket), listener))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop: uvloop, where it is installed, for a fifth less CPU time a request."""
    if find_spec("uvloop") is None:
        return None
    from uvloop import new_event_loop

    return new_event_loop


def server_of(
    app: ASGIApp, *, has_lifespan: bool = True, websocket: type[asyncio.Protocol] | None = None
) -> uvicorn.Server:
    """A server that ends when `should_exit` is set; the caller handles signals.

    has_lifespan: the application does something when it begins and ends. websocket: what WebSockets are read
    by; None = they are refused.
    """
    return _Server(
        _Config(
            app,
            http=_Connection,
            ws=websocket or "none",
            ws_max_size=MAX_FRAME_BYTES,
            # A few bytes may unpack to megabytes, and each session would hold tables for it.
            ws_per_message_deflate=False,
            log_level="warning",
            access_log=False,
            # A client on this machine could say that it has any address.
            proxy_headers=False,
            lifespan="on" if has_lifespan else "off",
            backlog=_ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=_LAST_REQUESTS_S,
        )
    )


async def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    limit = LogLimit()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(limit)
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    for number in (signal.SIGINT, signal.SIGTERM, *hangup):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    await server.serve(sockets=[listener])


class _Config(uvicorn.Config):
    """Its WebSockets begin in turns, some in each round of the event loop.

    Those before them go on in between: all at one stage would end at one time, and wait for each other again.
    """

    @cached_property
    def _waiting(self) -> deque[Callable[[], None]]:
        return deque()

    def begin_in_turn(self, begin: Callable[[], None]) -> None:
        self._waiting.append(begin)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for _ in range(min(len(self._waiting), _HANDSHAKES_AT_ONCE)):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_some)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which raise the signal again after shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        # uvicorn has one number for both: connections in the kernel's queue, and those accepted at once.
        for sock in sockets or ():
            sock.listen(WAITING_CONNECTIONS)


class _Connection(H11Protocol):
    """A connection that is closed where the head of a request, or the client's reading, takes too long.

    Waits for: the next request. Unblocked by: its head, or _HEAD_TIMEOUT_S after its first byte or after the
    connection was made. Of too many connections, the one that has waited longest for a head is closed.
    """

    _is_new = True
    _head_deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert _reads_and_writes(transport), "it is a socket's"
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > _max_connections():
            # WebSockets wait for no head, and stay.
            _longest_waiting(self.connections).transport.abort()

    def data_received(self, data: bytes) -> None:
        is_new, self._is_new = self._is_new, False
        if is_new and _is_handshake(data) and (make := self.ws_protocol_class) is not None:
            assert isinstance(self.config, _Config), "that of `server_of`"
            self.transport.pause_reading()
            self.config.begin_in_turn(partial(self._become_websocket, data, make))
            return
        super().data_received(data)
        # Without a pending request, these are a part of the next head, or of the body of a refused request.
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        elif self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._end_deadlines()

    def _become_websocket(self, head: bytes, make: Callable[..., asyncio.Protocol]) -> None:
        """As uvicorn does, but the head is parsed once: by the WebSocket, which keeps the case of names."""
        if self.transport.is_closing():
            return
        self._end_deadlines()
        self.connections.discard(self)
        websocket = make(config=self.config, server_state=self.server_state, app_state=self.app_state)
        websocket.connection_made(self.transport)
        line, end, fields = head.partition(b"\r\n")
        websocket.data_received(line + end + _FIELD_NAME.sub(lambda name: name[0].lower(), fields))
        self.transport.set_protocol(websocket)
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(_WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadlines()
        super().connection_lost(exc)

    def _end_deadlines(self) -> None:
        for deadline in (self._head_deadline, self._write_deadline):
            if deadline is not None:
                deadline.cancel()

    def _await_head(self) -> None:
        # Another protocol reads a socket that has become a WebSocket.
        is_own = self.transport.get_protocol() is self
        if self._head_deadline is None and is_own:
            self._head_deadline = self.loop.call_later(_HEAD_TIMEOUT_S, self.transport.abort)


def _is_handshake(data: bytes) -> bool:
    """Whether this is the whole head of a request for a WebSocket, and nothing else."""
    return data.find(_HEAD_END) == len(data) - len(_HEAD_END) and _UPGRADE in data.lower()


def _reads_and_writes(transport: asyncio.BaseTransport) -> TypeGuard[asyncio.Transport]:
    # uvloop's are of no class of asyncio's.
    return hasattr(transport, "pause_reading") and hasattr(transport, "write")


def _longest_waiting(connections: Iterable[object]) -> _Connection:
    """The connection that has waited longest for the head of a request."""
    deadlines = {
        connection: connection._head_deadline.when()
        for connection in connections
        if isinstance(connection, _Connection)
        and connection._head_deadline is not None
        and not connection.transport.is_closing()
    }
    return min(deadlines, key=deadlines.__getitem__)


def _max_connections() -> int:
    """The most open connections: below the limit of open files, at which nothing could be accepted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(soft // 2, soft - _FREE_FILES)


class LogLimit(logging.Filter):
    """Passes a number of log records in each interval; the next record has the number of those dropped."""

    def __init__(self, records: int = _LOG_RECORDS, interval_s: float = _LOG_INTERVAL_S) -> None:
        super().__init__()
        self._records = records
        self._interval_s = interval_s
        self._began_s = -interval_s
        self._passed = self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        if time.monotonic() >= self._began_s + self._interval_s:
            self._began_s, self._passed = time.monotonic(), 0
        self._passed += 1
        if self._passed > self._records:
            self._dropped += 1
            return False
        if self._dropped:
            record.msg = f"{record.getMessage()} ({self._dropped:,} records before it were dropped)"
            record.args, self._dropped = (), 0
        return True
