"""The HTTP servers of the package against browsers, half-sent requests, and clients that take connections."""

from __future__ import annotations

import asyncio
import logging
import resource

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.http import serving
from agentrl.http.serving import BodyReader, LogLimit, RequestChecks, host_names, json_list
from tests.listening import listening

KEY = "key-of-these-tests"


def application(checks=None, max_bytes=1 << 20):
    """Endpoints that count their calls: GET /read, POST /write, and POST /control behind the key."""
    checks, bodies, calls = checks or RequestChecks(control_key=KEY), BodyReader(max_bytes), []

    async def endpoint(request: Request) -> Response:
        body = await bodies.read(request)
        calls.append((request.url.path, len(body)))
        return JSONResponse({"bytes": len(body)})

    routes = [
        Route("/read", checks.checked(endpoint), methods=["GET"]),
        Route("/write", checks.checked(endpoint), methods=["POST"]),
        Route("/control", checks.checked(endpoint, control=True), methods=["POST"]),
    ]

    return Starlette(routes=routes), calls


def port_of(url):
    return int(url.rpartition(":")[2])


async def sent(url, data):
    """Send bytes over a new connection; returns all that comes back until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()


def head(method, path, *lines, host="127.0.0.1"):
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *lines, "", ""]
    ).encode()


def status_of(reply):
    return int(reply.split(b" ", 2)[1])


JSON = "Content-Type: application/json"
PAGES = [
    ("rebinding", "attacker.example", [JSON], 403),
    ("another name with our address in it", "127.0.0.1.attacker.example", [JSON], 403),
    ("user info", "127.0.0.1@attacker.example", [JSON], 403),
    ("every address of this machine", "0.0.0.0", [JSON], 403),
    ("a short spelling of an address", "127.1", [JSON], 403),
    ("no host", "", [JSON], 403),
    ("another origin", "127.0.0.1", [JSON, "Origin: https://www.w3.org"], 403),
    ("a file or a sandboxed frame", "127.0.0.1", [JSON, "Origin: null"], 403),
    ("another port of this machine", "127.0.0.1:1", [JSON, "Origin: http://127.0.0.1:2"], 403),
    ("another site", "127.0.0.1", [JSON, "Sec-Fetch-Site: cross-site"], 403),
    ("a form", "127.0.0.1", ["Content-Type: application/x-www-form-urlencoded"], 415),
    ("a simple request", "127.0.0.1", ["Content-Type: text/plain"], 415),
    ("a request without a type", "127.0.0.1", [], 415),
]


async def test_what_a_web_page_can_send_is_refused():
    app, calls = application()
    async with listening(app) as url:
        for name, host, lines, status in PAGES:
            reply = await sent(url, head("POST", "/write", *lines, "Content-Length: 2", host=host) + b"{}")
            assert status_of(reply) == status, (name, reply)
            if status == 403:
                assert status_of(await sent(url, head("GET", "/read", *lines, host=host))) == 403, name
        image = head("GET", "/read", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors")
        assert status_of(await sent(url, image)) == 403
    assert calls == []


async def test_clients_of_this_machine_are_served_under_each_of_its_names():
    app, calls = application(RequestChecks(host_names("127.0.0.1", "search.internal, Other")))
    async with listening(app) as url:
        hosts = [
            "127.0.0.1",
            f"127.0.0.1:{port_of(url)}",
            "localhost:1",
            "127.0.0.2",
            "[::1]:7",
            "search.internal:80",
        ]
        for host in [*hosts, "OTHER"]:
            lines = [
                "content-type: Application/JSON; charset=utf-8",
                "Content-Length: 2",
                f"Origin: http://{host}",
            ]
            assert status_of(await sent(url, head("POST", "/write", *lines, host=host) + b"{}")) == 200, host
            assert status_of(await sent(url, head("GET", "/read", host=host))) == 200, host
    assert len(calls) == 2 * 7


def test_a_name_to_listen_at_is_a_name_of_the_server_and_a_wildcard_is_not():
    assert host_names("Machine", "") == {"machine"}
    assert host_names("0.0.0.0", " a,,B ") == {"a", "b"}
    assert host_names("::", "") == frozenset()


@pytest.mark.parametrize(
    ("key", "lines", "status"),
    [
        (KEY, [], 401),
        (KEY, ["Authorization: Bearer another key of tests"], 401),
        (KEY, [f"Authorization: {KEY}"], 401),
        (KEY, [f"Authorization: Bearer {KEY}"], 200),
        (None, ["Authorization: Bearer None"], 403),
    ],
)
async def test_control_needs_the_key(key, lines, status):
    app, calls = application(RequestChecks(control_key=key))
    async with listening(app) as url:
        reply = await sent(url, head("POST", "/control", JSON, "Content-Length: 0", *lines))
    assert status_of(reply) == status
    assert len(calls) == (status == 200)
    assert KEY not in repr(RequestChecks(control_key=KEY))


@pytest.mark.full
async def test_half_sent_requests_are_ended(monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(serving, "_BODY_TIMEOUT_S", 0.3)
    app, calls = application()

    async def dripped(url, data):
        """Send a byte at a time: a limit on the pause between two bytes would not end it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url))
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if reader.at_eof() or writer.is_closing():
                break
        return await asyncio.wait_for(reader.read(), 5)

    complete = head("POST", "/write", JSON, "Content-Length: 100")
    async with listening(app) as url:
        none, part, slow, body, after = await asyncio.gather(
            sent(url, b""),
            sent(url, b"GET /read HTTP/1.1\r\nHost: 127"),
            asyncio.wait_for(
                asyncio.gather(
                    dripped(url, b"GET /read HTTP/1.1\r\nX: " + b"a" * 900), return_exceptions=True
                ),
                10,
            ),
            sent(url, complete.replace(b"Connection: close\r\n", b"") + b"{"),
            # Refused before its body is read, which then never ends.
            sent(url, complete.replace(b"/write", b"/nowhere").replace(b"Connection: close\r\n", b"") + b"{"),
        )
        assert (none, part) == (b"", b"")
        assert slow == [b""] or isinstance(slow[0], ConnectionError)
        assert status_of(body) == 408
        assert status_of(after) == 404
        assert status_of(await sent(url, head("GET", "/read"))) == 200
    assert calls == [("/read", 0)]


async def test_a_request_that_takes_long_is_not_cut(monkeypatch):
    monkeypatch.setattr(serving, "_HEAD_TIMEOUT_S", 0.1)

    async def slow(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(0.4)
        return JSONResponse(7)

    app = Starlette(routes=[Route("/", slow, methods=["POST"])])
    async with listening(app) as url, httpx2.AsyncClient(trust_env=False) as client:
        for _ in range(2):
            assert (await client.post(url, json={})).json() == 7


async def test_bodies_are_bounded_each_and_together(monkeypatch):
    monkeypatch.setattr(serving, "_MAX_ARRIVING_BYTES", 1500)
    app, calls = application(max_bytes=1000)
    declared = head("POST", "/write", JSON, "Content-Length: 1000").replace(b"Connection: close\r\n", b"")
    async with listening(app) as url:
        assert (
            status_of(await sent(url, head("POST", "/write", JSON, "Content-Length: 1001") + b" " * 1001))
            == 413
        )
        chunked = head("POST", "/write", JSON, "Transfer-Encoding: chunked")
        assert status_of(await sent(url, chunked + b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n")) == 413
        half = asyncio.create_task(sent(url, declared + b" " * 999))
        await asyncio.sleep(0.1)
        assert (
            status_of(await sent(url, head("POST", "/write", JSON, "Content-Length: 900") + b" " * 900))
            == 503
        )
        half.cancel()
        await asyncio.wait([half])
        await asyncio.sleep(0.1)
        assert (
            status_of(await sent(url, head("POST", "/write", JSON, "Content-Length: 900") + b" " * 900))
            == 200
        )
    assert calls == [("/write", 900)]


async def test_connections_that_send_nothing_do_not_keep_others_out(monkeypatch):
    monkeypatch.setattr(serving, "_max_connections", lambda: 20)
    app, _ = application()
    async with listening(app) as url:
        idle = [await asyncio.open_connection("127.0.0.1", port_of(url)) for _ in range(100)]
        assert status_of(await sent(url, head("GET", "/read"))) == 200
        ended = [asyncio.create_task(reader.read()) for reader, _ in idle]
        done, _ = await asyncio.wait(ended, timeout=0.5)
        assert len(done) >= 80
        for task in ended:
            task.cancel()
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(("soft", "most"), [(1024, 768), (100, 50), (resource.RLIM_INFINITY, 65536)])
def test_connections_leave_files_free(monkeypatch, soft, most):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert serving._max_connections() == most


def test_a_flood_of_log_records_is_cut_and_counted(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(serving.time, "monotonic", lambda: now_s)
    limit, written = LogLimit(records=3, interval_s=10), []

    def log(number):
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "number %d", (number,), None)
        if limit.filter(record):
            written.append(record.getMessage())

    for number in range(1000):
        log(number)
    assert written == ["number 0", "number 1", "number 2"]
    now_s = 111.0
    log(1000)
    log(1001)
    assert written[3:] == ["number 1000 (997 records before it were dropped)", "number 1001"]


async def test_a_list_is_encoded_as_one_array_while_others_run():
    turns = []

    async def other():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert await json_list([{"a": "é"}, [1, 2]]) == '[{"a":"é"},[1,2]]'.encode()
    assert await json_list([]) == b"[]"
    assert len(turns) >= 2
    task.cancel()


async def test_a_client_has_the_address_that_it_sends_from():
    """Addresses take turns: a client with many of them would be served before the others."""

    async def who(request: Request) -> Response:
        return JSONResponse(request.client.host)

    app = Starlette(routes=[Route("/", who)])
    async with listening(app) as url, httpx2.AsyncClient(trust_env=False) as client:
        assert (await client.get(url, headers={"X-Forwarded-For": "10.1.2.3"})).json() == "127.0.0.1"
