"""Servers over streamable HTTP: a session per episode or one for all, and no other origin is reached."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from subprocess import DEVNULL, Popen

import pytest

from agentrl.errors import ToolError, ToolRejected
from agentrl.tools import release_shared
from agentrl.tools.mcp import McpTools
from tests.tools.mcp.watching import SDK, ended, in_flight, opened


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@contextmanager
def serving(*more: str):
    """The SDK's server on loopback; its process and its URL."""
    port = free_port()
    process = Popen([sys.executable, SDK, str(port), *more], stdout=DEVNULL, stderr=DEVNULL)
    try:
        for _ in range(2000):
            if process.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)) == 0:
                break
            threading.Event().wait(0.01)
        yield process, f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    with serving() as (_, url):
        yield url


async def test_two_episodes_at_once_have_sessions_of_their_own_and_close_them(url):
    toolkit = McpTools(url=url)
    async with opened(toolkit) as first, opened(toolkit) as second:
        assert [await first["count"].invoke({}) for _ in range(3)] == ["1", "2", "3"]
        assert await second["count"].invoke({"by": 10}) == "10"
        assert await first["count"].invoke({}) == "4"
    async with opened(toolkit) as later:
        assert await later["count"].invoke({}) == "1"


async def test_a_stateless_server_is_one_session_for_all(url):
    toolkit = McpTools(url=url, stateful=False, only=["add", "count"])
    async with opened(toolkit) as first, opened(toolkit) as second:
        assert list(first) == ["add", "count"]
        assert await asyncio.gather(*(first["add"].invoke({"a": k, "b": 1}) for k in range(20))) == [
            str(k + 1) for k in range(20)
        ]
        assert await second["add"].invoke({"a": 40, "b": 2}) == "42"
    await release_shared()


@pytest.mark.parametrize("stateful", [True, False])
async def test_an_answer_without_bounds_is_cut_off_and_the_session_goes_on(url, stateful):
    # The first is answered with a stream of events, the second with a body.
    async with opened(McpTools(url=url, stateful=stateful)) as tools:
        assert len(await tools["flood"].invoke({"characters": 1_000_000})) == 1_000_000
        with pytest.raises(ToolRejected, match="the answer has more than 16,777,216 bytes; ask for less"):
            await tools["flood"].invoke({"characters": 17_000_000})
        assert await tools["add"].invoke({"a": 1, "b": 2}) == "3"
    await release_shared()


async def test_a_call_that_is_cancelled_leaves_the_session_usable(url, tmp_path):
    async with opened(McpTools(url=url)) as tools:
        assert await tools["count"].invoke({}) == "1"
        waiting, _ = await in_flight(tools["wait"], tmp_path / "mark", seconds=600)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await tools["count"].invoke({}) == "2"


@pytest.mark.parametrize("stateful", [True, False])
async def test_a_server_killed_in_mid_call_is_a_crash_and_then_unavailable(tmp_path, stateful):
    with serving() as (process, url):
        toolkit = McpTools(url=url, stateful=stateful)
        async with opened(toolkit) as tools:
            calling, server = await in_flight(tools["wait"], tmp_path / "mark", seconds=600)
            assert server == process.pid
            os.kill(server, signal.SIGKILL)
            with pytest.raises(ToolError, match="ended during a call of `wait`") as caught:
                await ended(calling)
            assert caught.value.kind == "crashed"
        await release_shared()
        with pytest.raises(ToolError, match="did not start") as caught:
            async with opened(toolkit):
                pass
        assert caught.value.kind == "unavailable"


class Elsewhere(BaseHTTPRequestHandler):
    """Redirects every request to another origin."""

    target = ""
    num_requests = 0

    def do_POST(self) -> None:
        type(self).num_requests += 1
        self.send_response(307)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Packed(BaseHTTPRequestHandler):
    """Answers every request with zeros, packed twice."""

    kind = ""

    def do_POST(self) -> None:
        body = gzip.compress(gzip.compress(bytes(10_000_000)))
        self.send_response(200)
        self.send_header("Content-Type", self.kind)
        self.send_header("Content-Encoding", "gzip, gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_packed_reply_is_refused_in_a_sentence(kind):
    httpd = HTTPServer(("127.0.0.1", 0), Packed)
    Packed.kind = kind
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        with pytest.raises(ToolError, match="the reply is packed with 'gzip, gzip'; the server must send it"):
            async with opened(McpTools(url=f"http://127.0.0.1:{httpd.server_port}/mcp")):
                pass
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class Garbled(BaseHTTPRequestHandler):
    """A server whose first tool has no schema."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "garbled", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "bad"}, {"name": "good", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "well"}]},
        }
        reply = {"jsonrpc": "2.0", "id": message.get("id"), "result": results.get(message["method"], {})}
        body = json.dumps(reply).encode() if "id" in message else b""
        self.send_response(200 if body else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


async def test_a_tool_that_is_described_by_nothing_takes_no_other_with_it():
    httpd = HTTPServer(("127.0.0.1", 0), Garbled)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        toolkit = McpTools(url=f"http://127.0.0.1:{httpd.server_port}/mcp", only=["good"])
        async with opened(toolkit) as tools:
            assert await tools["good"].invoke({}) == "well"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


async def test_a_redirect_to_another_origin_is_not_followed(url):
    httpd = HTTPServer(("127.0.0.1", 0), Elsewhere)
    Elsewhere.target = url
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        with pytest.raises(ToolError, match=r"Redirect to .* not followed") as caught:
            async with opened(McpTools(url=f"http://127.0.0.1:{httpd.server_port}/mcp")):
                pass
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
    assert caught.value.kind == "unavailable"
    assert Elsewhere.num_requests
