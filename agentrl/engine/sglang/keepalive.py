"""HTTP/1.1 over connections that are used again, for little more than the cost of the bytes.

Servers end hundreds of turns in one step. Whatever the client spends on each of them delays the next turn of
all others, and a general client spends more than the rest of a request together. This one does what a server
of completions needs: one request at a time on a connection; a reply that is read as a whole. A reply is
untrusted: its head, the lines between its chunks and its body are bounded before anything is parsed.

    idle  --request-->  waits  --reply-->  idle                closed after a reply that says so
    idle  --any bytes, the end, 2 s-->  closed                 closed by a broken reply, a cancellation
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias, cast

import httpx2

from agentrl.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0
# Servers close connections that were idle for 5 s: a request sent at that moment would be lost.
_KEEP_IDLE_S = 2.0
_MAX_HEAD_BYTES = 64 << 10
_MAX_CHUNKS = 100_000  # of a few bytes each, they hold the event loop for longer than a large body
_MAX_LENGTH_DIGITS = 15
_OK, _WITHOUT_BODY = 200, {204, 304}
_INTERIM, _SWITCHING = range(100, 200), 101
_NAME_CHARS = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


Sink: TypeAlias = Callable[[bytes], None]
"""Takes the chunks of a body as they come. A ValueError of it ends the reply."""


class UnreachableError(Exception):
    """There is no connection: nothing of the request was sent."""


class BrokenReplyError(Exception):
    """The connection ended before the reply, or what came is no HTTP/1.1."""


class Reply(NamedTuple):
    """A complete reply."""

    status: int
    body: bytes


class ReplyReader:
    """The bytes of a connection -> one reply.

    max_bytes: of its body, or of a chunk of it where a `sink` takes them: the reply then has no body.
    is_last: the connection cannot be used again after it.
    """

    def __init__(self, max_bytes: int, sink: Sink | None = None) -> None:
        self._max_bytes, self._sink = max_bytes, sink
        self._received = bytearray()
        self._has_ended = False
        self._reading = self._read()
        self.is_last = False

    def feed(self, data: bytes) -> Reply | None:
        """Add bytes; returns the reply once it is complete.

        Raises:
            BrokenReplyError: they are no reply of HTTP/1.1, or go on after its end.
            ValueError: the body is longer than `max_bytes`.
        """
        self._received += data
        return self._go_on()

    def end(self) -> Reply:
        """The reply, where the connection has ended: that is the end of one without a length.

        Raises:
            BrokenReplyError: it is not complete.
        """
        self._has_ended = True
        reply = self._go_on()
        if reply is None:
            raise BrokenReplyError("the server closed the connection before the end of its reply")
        return reply

    def _go_on(self) -> Reply | None:
        try:
            next(self._reading)
        except StopIteration as stop:
            if self._received:
                raise BrokenReplyError("the server sent more than its reply") from None
            reply: Reply = stop.value
            return reply
        return None

    def _read(self) -> Generator[None, None, Reply]:
        """The reply; each yield waits for more bytes."""
        status = _INTERIM.start
        while status in _INTERIM:
            status, version, fields = _head_of((yield from self._until(b"\r\n\r\n", "head")))
        options = fields.get(b"connection", b"").lower()
        self.is_last = b"close" in options or (version == b"HTTP/1.0" and b"keep-alive" not in options)
        if status in _WITHOUT_BODY:
            return Reply(status, b"")
        if b"transfer-encoding" in fields:
            if fields[b"transfer-encoding"].lower() != b"chunked" or b"content-length" in fields:
                raise BrokenReplyError("the length of the reply cannot be told from its headers")
            kept = bytearray()
            taken = kept.extend if self._sink is None or status != _OK else self._sink
            yield from self._chunks(kept, taken)
            return Reply(status, bytes(kept))
        if b"content-length" in fields:
            return Reply(
                status, bytes((yield from self._exactly(self._bounded(fields[b"content-length"], 10))))
            )
        self.is_last = True
        while not self._has_ended:
            self._check(len(self._received))
            yield
        body = bytes(self._received)
        self._received.clear()
        return Reply(status, body)

    def _chunks(self, body: bytearray, taken: Sink) -> Generator[None, None, None]:
        number = 0
        while size := self._bounded((yield from self._until(b"\r\n", "line")).partition(b";")[0], 16):
            self._check(len(body) + size)
            taken(bytes((yield from self._exactly(size))))
            if (yield from self._until(b"\r\n", "line")):
                raise BrokenReplyError("a chunk of the reply is longer than it says")
            number += 1
            if number > _MAX_CHUNKS:
                raise BrokenReplyError(f"the reply is longer than {_MAX_CHUNKS:,} chunks")
        length = 0
        # Fields may follow the last chunk, and an empty line does; nothing of them is used.
        while field := (yield from self._until(b"\r\n", "line")):
            length += len(field)
            if length > _MAX_HEAD_BYTES:
                raise BrokenReplyError(f"what follows the reply is longer than {_MAX_HEAD_BYTES:,} bytes")

    def _until(self, mark: bytes, what: str) -> Generator[None, None, bytes]:
        """What stands before the mark, which is removed, too."""
        begin = 0
        while (end := self._received.find(mark, begin, _MAX_HEAD_BYTES)) < 0:
            if len(self._received) >= _MAX_HEAD_BYTES:
                raise BrokenReplyError(f"a {what} of the reply is longer than {_MAX_HEAD_BYTES:,} bytes")
            begin = max(0, len(self._received) - len(mark) + 1)
            yield
        found = bytes(self._received[:end])
        del self._received[: end + len(mark)]
        return found

    def _exactly(self, size: int) -> Generator[None, None, bytearray]:
        while len(self._received) < size:
            yield
        if len(self._received) == size:
            found, self._received = self._received, bytearray()
            return found
        found = self._received[:size]
        del self._received[:size]
        return found

    def _bounded(self, number: bytes, base: int) -> int:
        """A number of bytes, from its digits."""
        digits = number.strip()
        if not (digits.isalnum() and len(digits) <= _MAX_LENGTH_DIGITS):
            raise BrokenReplyError(f"{_excerpt(number)} is no length of a reply")
        try:
            size = int(digits, base)
        except ValueError:
            raise BrokenReplyError(f"{_excerpt(number)} is no length of a reply") from None
        self._check(size)
        return size

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise ValueError(f"the reply is longer than {self._max_bytes:,} bytes")


def _head_of(head: bytes) -> tuple[int, bytes, dict[bytes, bytes]]:
    """The status, the version, and the fields by name in lower case; several of one name are joined."""
    line, *lines = head.split(b"\r\n")
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not (len(code) == 3 and code.isdigit()):
        raise BrokenReplyError(f"{_excerpt(line)} is no status of HTTP/1.1")
    if int(code) == _SWITCHING:
        raise BrokenReplyError("the server changes to another protocol")
    fields: dict[bytes, bytes] = {}
    for field in lines:
        name, colon, value = field.partition(b":")
        name, value = name.lower(), value.strip()
        if not (name and colon):
            raise BrokenReplyError(f"{_excerpt(field)} is no header")
        # A length that was sent twice is still one, if it is the same.
        if name in fields and not (name == b"content-length" and fields[name] == value):
            value = fields[name] + b", " + value
        fields[name] = value
    return int(code), version, fields


def _excerpt(line: bytes) -> str:
    return repr(line[:40].decode("latin-1"))


class _Link(asyncio.Protocol):
    """One connection. idle_since_s: when its last reply was complete, by the event loop's clock."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[Reply] | None = None
        self._reader = ReplyReader(0)
        self.idle_since_s = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, *request: bytes, max_bytes: int, sink: Sink | None) -> Reply:
        """Send a request and wait for its reply; cancellation closes the connection. See `ReplyReader`.

        Raises:
            BrokenReplyError: it ended without a reply.
            ValueError: the reply is too long.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise BrokenReplyError("the server closed the connection")
        self._reader = ReplyReader(max_bytes, sink)
        self._reply = self._loop.create_future()
        for part in request:
            transport.write(part)
        is_reusable = False
        try:
            reply = await self._reply
            is_reusable = not (self._reader.is_last or transport.get_write_buffer_size())
        finally:
            self._reply = None
            if not is_reusable:
                transport.abort()
        self.idle_since_s = self._loop.time()
        return reply

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._reply is None or self._reply.done():
            # Nobody asked: the next request must not take it for its reply.
            return self.close()
        try:
            reply = self._reader.feed(data)
        except (BrokenReplyError, ValueError) as error:
            self._reply.set_exception(error)
        else:
            if reply is not None:
                self._reply.set_result(reply)
        return None

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        if self._reply is not None and not self._reply.done():
            try:
                self._reply.set_result(self._reader.end())
            except BrokenReplyError as error:
                self._reply.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._transport = None
        if self._reply is not None and not self._reply.done():
            reason = str(exc) if exc is not None else "the connection was closed"
            self._reply.set_exception(BrokenReplyError(reason))


class _Target(NamedTuple):
    """host, port, is_secure: of the address. path: with the query. authority: for the header `host`."""

    host: str
    port: int
    is_secure: bool
    path: bytes
    authority: bytes


@lru_cache(maxsize=256)
def _target_of(url: str) -> _Target:
    parsed = httpx2.URL(url)
    is_secure = parsed.scheme == "https"
    host = parsed.raw_host.decode("ascii")
    return _Target(host, parsed.port or (443 if is_secure else 80), is_secure, parsed.raw_path, parsed.netloc)


class Connections:
    """Connections to servers: as many as there are requests at once, used again, the latest first.

    headers: sent with every request. certificates: those of https. max_bytes: of a reply, at most.

    Raises:
        ConfigError: a header cannot be sent.
    """

    def __init__(
        self, headers: Mapping[str, str], certificates: ssl.SSLContext | None, max_bytes: int
    ) -> None:
        self._headers = header_lines(headers)
        self._certificates, self._max_bytes = certificates, max_bytes
        self._idle: dict[tuple[str, int, bool], list[_Link]] = {}

    async def send(
        self,
        method: str,
        url: str,
        body: bytes,
        headers: bytes,
        max_bytes: int | None = None,
        sink: Sink | None = None,
    ) -> Reply:
        """Send a request and wait for its reply. headers: as `header_lines` writes them.

        max_bytes: of this reply; None = those of all. sink: takes its chunks, see `ReplyReader`.

        Raises:
            UnreachableError: there is no connection.
            BrokenReplyError: it ended before the reply.
            ValueError: the reply is too long.
        """
        target = _target_of(url)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%bcontent-length: %d\r\n\r\n" % (
            *(method.encode(), target.path, target.authority, self._headers, headers),
            len(body),
        )
        link = await self._link(target)
        # One packet where the body is small; a large one is not copied.
        parts = (head + body,) if len(body) < _MAX_HEAD_BYTES else (head, body)
        most = self._max_bytes if max_bytes is None else min(max_bytes, self._max_bytes)
        reply = await link.exchange(*parts, max_bytes=most, sink=sink)
        if link.is_usable:
            self._idle.setdefault(target[:3], []).append(link)
        return reply

    async def close(self) -> None:
        """Close the idle connections; those in use are closed by their requests' cancellation."""
        links = [link for links in self._idle.values() for link in links]
        self._idle.clear()
        for link in links:
            link.close()
        # The transports close in the next iteration of the event loop.
        await asyncio.sleep(0)

    async def _link(self, target: _Target) -> _Link:
        """An idle connection, or a new one."""
        loop = asyncio.get_running_loop()
        idle = self._idle.get(target[:3], [])
        while idle:
            link = idle.pop()
            if loop.time() - link.idle_since_s > _KEEP_IDLE_S:
                # All that are left have been idle for longer.
                for old in (link, *idle):
                    old.close()
                idle.clear()
            elif link.is_usable:
                return link
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, link = await loop.create_connection(
                    _Link,
                    target.host,
                    target.port,
                    ssl=self._certificates if target.is_secure else None,
                )
        except TimeoutError:
            raise UnreachableError(f"no connection in {_CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error
        return link


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent.

    Raises:
        ConfigError: a name or a value has characters that no header may have.
    """
    for name, value in headers.items():
        if not (name and _NAME_CHARS.issuperset(name) and value.isascii() and (value + " ").isprintable()):
            raise ConfigError(f"the header {name[:40]!r} cannot be sent; write it in printable ASCII.")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
