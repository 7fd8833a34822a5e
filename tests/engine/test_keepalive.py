"""Connections that are used again: every form of a reply, in every cut; hostile, closing and real servers."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.engine.sglang import keepalive
from agentrl.engine.sglang.keepalive import (
    BrokenReplyError,
    Connections,
    ReplyReader,
    UnreachableError,
    header_lines,
)
from agentrl.errors import ConfigError
from tests.engine.serving import free_port
from tests.listening import listening

PATIENCE_S, LIMIT = 20, 1 << 20
OK = b"HTTP/1.1 200 OK\r\n"


class RawServer:
    """Answers the n-th request of all connections with the n-th script; the last one repeats.

    A script is bytes to send, or bytes and "close". connections: their number. requests: heads and bodies.
    """

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.connections = 0
        self.requests = []
        self.writers = []
        self.closed = asyncio.Event()

    @asynccontextmanager
    async def listening(self, **options):
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, **options)
        scheme = "https" if options else "http"
        try:
            yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                script = self.scripts[0] if len(self.scripts) == 1 else self.scripts.pop(0)
                content, then = script if isinstance(script, tuple) else (script, "")
                if then == "hang":
                    await reader.read()
                writer.write(content)
                await writer.drain()
                if then == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()


def with_length(body, head=OK):
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def in_chunks(*chunks, end=b"0\r\n\r\n"):
    sent = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + sent + end


@asynccontextmanager
async def connections(certificates=None, max_bytes=LIMIT, headers=None):
    made = Connections(headers or {}, certificates, max_bytes)
    try:
        yield made
    finally:
        await made.close()


async def post(made, url, body=b"{}"):
    return await asyncio.wait_for(made.send("POST", f"{url}/generate?a=b", body, b""), PATIENCE_S)


def read(data, pieces, max_bytes=LIMIT):
    """The reply of a reader that gets the bytes in pieces of this size; None = it wants more."""
    reader = ReplyReader(max_bytes)
    for start in range(0, len(data), pieces):
        reply = reader.feed(data[start : start + pieces])
        if reply is not None:
            assert start + pieces >= len(data), "nothing follows a reply"
            return reply, reader.is_last
    return None


FORMS = {
    "length": (with_length(b'{"a": 1}'), (200, b'{"a": 1}'), False),
    "upper case": (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:2\r\n\r\nab", (200, b"ab"), False),
    "length twice": (OK + b"content-length: 2\r\nContent-Length: 2\r\n\r\nab", (200, b"ab"), False),
    "chunks": (in_chunks(b"ab", b"\r\n", b"c" * 300), (200, b"ab\r\n" + b"c" * 300), False),
    "no chunks": (in_chunks(), (200, b""), False),
    "chunk extensions": (
        OK + b"transfer-encoding: Chunked\r\n\r\n2;x=y\r\nab\r\n0\r\n\r\n",
        (200, b"ab"),
        False,
    ),
    "fields behind chunks": (in_chunks(b"ab", end=b"0\r\nx: y\r\nz: 1\r\n\r\n"), (200, b"ab"), False),
    "interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\na: b\r\n\r\n" + with_length(b"a"),
        (200, b"a"),
        False,
    ),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b""), False),
    "closing": (with_length(b"a", OK + b"Connection: Close\r\n"), (200, b"a"), True),
    "old": (with_length(b"a", b"HTTP/1.0 200 OK\r\n"), (200, b"a"), True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_reply_is_read_however_it_is_cut(form):
    data, reply, is_last = FORMS[form]
    for pieces in range(1, len(data) + 1):
        assert read(data, pieces) == (reply, is_last)
    for size in range(len(data)):
        reader = ReplyReader(LIMIT)
        assert reader.feed(data[:size]) is None, "a part of a reply is none"
        with pytest.raises(BrokenReplyError):
            reader.end()


def test_a_reply_without_a_length_ends_with_its_connection():
    reader = ReplyReader(LIMIT)
    assert reader.feed(OK + b"a: b\r\n\r\nab") is None
    assert reader.feed(b"c") is None
    assert (reader.end(), reader.is_last) == ((200, b"abc"), True)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x16\x03\x01\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 abc X\r\n\r\n", b"HTTP/1.1 20\r\n\r\n"),
        *(OK + b"no header\r\n\r\n", OK + b": x\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n"),
        *(
            OK + b"content-length: %b\r\n\r\nab" % wrong
            for wrong in (b"-1", b"+2", b"2, 3", b"", b"0x2", b"1_0")
        ),
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        OK + b"content-length: %b\r\n\r\n" % (b"9" * 5000),
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        *(
            OK + b"transfer-encoding: chunked\r\n\r\n%b" % bad
            for bad in (b"x\r\n", b"-1\r\n", b"\r\n", b"1_0\r\n")
        ),
        OK + b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        with_length(b"ab") + b"HTTP/1.1 200 OK\r\n",
        in_chunks(b"ab") + b"more",
    ],
)
def test_what_is_no_reply_is_refused(data):
    with pytest.raises(BrokenReplyError):
        read(data, len(data))


@pytest.mark.parametrize(
    "endless",
    [
        lambda: (OK, b"x: y\r\n"),
        lambda: (b"HTTP/1.1 ", b"2" * 1000),
        lambda: (OK + b"transfer-encoding: chunked\r\n\r\n", b"1" * 1000),
        lambda: (OK + b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 1000),
        lambda: (OK + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 100),
        lambda: (OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 1000),
        lambda: (OK + b"\r\n", b"x" * 1000),
        lambda: (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\n", b"x" * 1000),
    ],
)
def test_what_never_ends_is_refused_before_it_fills_memory(endless):
    begin, more = endless()
    reader = ReplyReader(LIMIT)
    reader.feed(begin)
    tracemalloc.start()

    def feed():
        for _ in range(8 * LIMIT // len(more)):
            reader.feed(more)

    with pytest.raises((BrokenReplyError, ValueError), match="longer than"):
        feed()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 * LIMIT


@pytest.mark.parametrize("data", [OK + b"content-length: 2000\r\n\r\n", in_chunks(b"a" * 2000)[:70]])
def test_an_announced_length_is_refused_before_the_body_comes(data):
    with pytest.raises(ValueError, match="longer than 1,000 bytes"):
        read(data, len(data), max_bytes=1000)


async def test_a_connection_is_used_again_and_the_request_says_what_it_should():
    server = RawServer(with_length(b"a"))
    async with server.listening() as url, connections(headers={"Authorization": "Bearer k"}) as made:
        for _ in range(5):
            assert await post(made, url, b'{"x": 1}') == (200, b"a")
    assert server.connections == 1
    head, body = server.requests[0]
    lines = head.split("\r\n")
    assert lines[0] == "POST /generate?a=b HTTP/1.1"
    assert set(lines[1:-2]) == {
        f"host: {url.removeprefix('http://')}",
        "Authorization: Bearer k",
        "content-length: 8",
    }
    assert body == b'{"x": 1}'


async def test_as_many_connections_as_requests_at_once_and_no_reply_goes_to_another_request(monkeypatch):
    # A busy machine takes longer for a round than a connection may be idle.
    monkeypatch.setattr(keepalive, "_KEEP_IDLE_S", 600.0)

    class Echo(RawServer):
        async def _serve(self, reader, writer):
            self.connections += 1
            while head := (await reader.readline()):
                while (line := await reader.readline()) != b"\r\n":
                    head += line.lower()
                body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                await asyncio.sleep(int(body) % 7 / 1000)
                writer.write(with_length(body))

    server = Echo()
    async with server.listening() as url, connections() as made:
        for _ in range(3):
            bodies = [b"%d" % number for number in range(200)]
            replies = await asyncio.gather(*(post(made, url, body) for body in bodies))
            assert [reply.body for reply in replies] == bodies
    assert server.connections == 200


async def test_a_connection_that_the_server_closed_while_idle_is_replaced():
    server = RawServer(with_length(b"a"))
    async with server.listening() as url, connections() as made:
        await post(made, url)
        server.writers[0].close()
        await server.writers[0].wait_closed()
        await asyncio.sleep(0.05)
        assert await post(made, url) == (200, b"a")
    assert server.connections == 2


async def test_what_comes_on_an_idle_connection_is_never_the_reply_of_the_next_request():
    server = RawServer(with_length(b"a"))
    async with server.listening() as url, connections() as made:
        await post(made, url)
        server.writers[0].write(with_length(b"late", b"HTTP/1.1 408 Request Timeout\r\n"))
        await asyncio.sleep(0.05)
        assert await post(made, url) == (200, b"a")
    assert server.connections == 2


@pytest.mark.parametrize(
    "script",
    [
        with_length(b"a", OK + b"connection: close\r\n"),
        (OK + b"\r\na", "close"),
        (with_length(b"a"), "close"),
    ],
)
async def test_a_reply_that_ends_its_connection_is_complete_and_the_next_request_gets_a_new_one(script):
    server = RawServer(script)
    async with server.listening() as url, connections() as made:
        for _ in range(3):
            assert await post(made, url) == (200, b"a")
            await asyncio.sleep(0.02)
    assert server.connections == 3


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch):
    server = RawServer(with_length(b"a"))
    async with server.listening() as url, connections() as made:
        await asyncio.gather(*(post(made, url) for _ in range(4)))
        monkeypatch.setattr(keepalive, "_KEEP_IDLE_S", 0.0)
        await asyncio.sleep(0.01)
        await post(made, url)
        await asyncio.wait_for(server.closed.wait(), PATIENCE_S)
        assert server.connections == 5


@pytest.mark.parametrize("sent", [b"", OK, with_length(b"abc")[:-1], in_chunks(b"abc")[:-2]])
async def test_a_server_that_breaks_off_is_an_error_and_the_next_request_gets_a_new_connection(sent):
    server = RawServer((sent, "close"), with_length(b"a"))
    async with server.listening() as url, connections() as made:
        with pytest.raises(BrokenReplyError):
            await post(made, url)
        assert await post(made, url) == (200, b"a")
    assert server.connections == 2


async def test_a_cancelled_request_closes_its_connection():
    server = RawServer((b"", "hang"))
    async with server.listening() as url, connections() as made:
        task = asyncio.create_task(post(made, url))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.closed.wait(), PATIENCE_S)


async def test_a_reply_before_the_whole_request_is_taken_and_the_connection_is_closed():
    class Hasty(RawServer):
        async def _serve(self, reader, writer):
            self.connections += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(with_length(b"too large", b"HTTP/1.1 413 Content Too Large\r\n"))
            await asyncio.sleep(1)
            writer.close()

    server = Hasty()
    async with server.listening() as url, connections() as made:
        for _ in range(2):
            assert (await post(made, url, b"x" * (16 << 20))).status == 413
    assert server.connections == 2


async def test_where_nobody_listens_nothing_was_sent():
    async with connections() as made:
        with pytest.raises(UnreachableError):
            await post(made, f"http://127.0.0.1:{free_port()}")


async def test_a_server_that_never_accepts_is_given_up(monkeypatch):
    monkeypatch.setattr(keepalive, "_CONNECT_TIMEOUT_S", 0.1)

    async def hang(*_, **__):
        await asyncio.Event().wait()

    async with connections() as made:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
        with pytest.raises(UnreachableError, match=r"no connection in 0\.1 s"):
            await post(made, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("name", "value"), [("a", "x\r\ny: z"), ("a", "é"), ("a b", "x"), ("", "x"), ("a:", "x"), ("a", "\x00")]
)
def test_a_header_that_would_be_two_or_none_is_refused(name, value):
    with pytest.raises(ConfigError, match="cannot be sent"):
        header_lines({name: value})


async def test_a_real_server_answers_in_every_form():
    async def answer(request):
        body = await request.body()
        form = request.query_params["form"]
        if form == "chunks":
            return StreamingResponse(iter([body[:3], body[3:]]), 201)
        return Response(status_code=204) if form == "none" else JSONResponse(json.loads(body), 400)

    app = Starlette(routes=[Route("/x", answer, methods=["POST"])])
    async with listening(app) as url, connections() as made:
        for _ in range(3):
            sent = {
                form: await made.send("POST", f"{url}/x?form={form}", b'{"a":1}', b"")
                for form in ("chunks", "none", "json")
            }
            assert sent == {"chunks": (201, b'{"a":1}'), "none": (204, b""), "json": (400, b'{"a":1}')}
            await asyncio.sleep(0)


async def test_an_encrypted_server_is_asked_only_under_its_own_certificate(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certificate, key)
    server = RawServer(with_length(b"a"))
    async with server.listening(ssl=own) as url:
        async with connections(ssl.create_default_context(cafile=str(certificate))) as made:
            assert [await post(made, url, b"x" * 300_000) for _ in range(3)] == [(200, b"a")] * 3
        assert (server.connections, server.requests[0][1]) == (1, b"x" * 300_000)
        async with connections(ssl.create_default_context()) as made:
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await post(made, url)
