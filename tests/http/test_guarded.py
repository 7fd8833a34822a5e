"""A client that reaches only allowed addresses, against real servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, ToolError, ToolRejected
from agentrl.http.guarded import AllowedAddresses, GuardedTransport, headers_to, sent_with


def real(spelling: str) -> str:
    """`web` and `webs` stand for http and https: the hosts of this file are fictional."""
    return spelling.replace("web:/", "http:/").replace("webs:/", "https:/")


@dataclass
class Server:
    """Answers every request, with a redirect where `location` is set, and keeps the request heads."""

    port: int = 0
    location: str | None = None
    heads: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                moved = self.location is not None and b"/start" in head.split(b"\r\n")[0]
                status = f"302 Found\r\nLocation: {self.location}" if moved else "200 OK"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nok".encode())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for server in servers:
            listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
            stack.push_async_callback(listener.wait_closed)
            stack.callback(listener.close)
            server.port = listener.sockets[0].getsockname()[1]
        yield


async def test_the_allowed_server_answers_and_others_get_no_request():
    ours, other = Server(), Server()
    async with serving(ours, other), AllowedAddresses(ours.url).client() as client:
        assert (await client.get(f"{ours.url}/some/page")).text == "ok"
        with pytest.raises(ToolRejected) as refused:
            await client.get(f"{other.url}/")
    assert str(refused.value) == f"{other.url} is not an allowed address; allowed: {ours.url}."
    assert (len(ours.heads), len(other.heads)) == (1, 0)


@pytest.mark.parametrize(
    "spelling",
    [
        *("web://127.1:{port}/", "web://2130706433:{port}/", "web://0x7f000001:{port}/"),
        *("web://0177.0.0.1:{port}/", "web://127.0.0.1.:{port}", "http://localhost:{port}/"),
        *("web://[::ffff:127.0.0.1]:{port}/", "web://0:{port}/", "web://[::]:{port}/"),
        *("webs://127.0.0.1:{port}/", "http://127.0.0.1/", "http://127.0.0.1:{port}@localhost:{port}/"),
        *("ftp://127.0.0.1:{port}/", "file:///etc/passwd", "//127.0.0.1:{port}/", "127.0.0.1:{port}"),
        *("web://user:secret@127.0.0.1:{port}/", "web://@localhost:{port}", "ws://127.0.0.1:{port}/"),
        *("http://127.0.0.1:{port}\\@localhost:{port}/", "web:///etc", "/etc", "web://1\u30022.3.4/"),
        *("unix:///run/x", "data:text/plain,x", "web://", "web://127%2e0.0.1:{port}/"),
    ],
)
async def test_other_spellings_and_schemes_reach_nothing(spelling):
    server = Server()
    async with serving(server), AllowedAddresses(server.url).client() as client:
        url = real(spelling).format(port=server.port)
        with pytest.raises((ToolRejected, httpx2.InvalidURL)):
            await client.get(url)
        with pytest.raises(ToolRejected):
            AllowedAddresses(server.url).check(url)
    assert server.heads == []


async def test_what_denotes_the_same_origin_is_allowed():
    spelled = ["web://LocalHost", "webs://[0:0::1]:443/retrieve?x=1", "web://b\u00fccher.example"]
    allowed = AllowedAddresses(*map(real, spelled))
    same = ["HTTP://LOCALHOST:80/x", "webs://[::1]/y", "web://xn--bcher-kva.example:80/"]
    assert [str(allowed.check(real(url)).raw_path, "ascii") for url in same] == ["/x", "/y", "/"]
    assert str(allowed) == real("web://localhost:80, web://xn--bcher-kva.example:80, webs://[::1]:443")


async def test_a_redirect_inside_is_followed_and_one_to_another_origin_is_a_server_error():
    first, second, stranger = Server(), Server(), Server()
    async with (
        serving(first, second, stranger),
        AllowedAddresses(first.url, second.url).client(headers={"Authorization": "ours"}) as client,
    ):
        first.location = f"{second.url}/there"
        assert str((await client.get(f"{first.url}/start")).url) == first.location
        assert "ours" in first.heads[0]
        assert "ours" not in second.heads[0], "another origin is not shown our credentials"
        for elsewhere in (
            f"{stranger.url}/",
            f"//localhost:{first.port}/",
            real(f"web://me@127.0.0.1:{first.port}/"),
        ):
            first.location = elsewhere
            with pytest.raises(ToolError, match="a server redirects elsewhere") as refused:
                await client.get(f"{first.url}/start")
            assert refused.value.kind == "refused"
    assert stranger.heads == []


async def test_the_key_of_an_own_server_reaches_it_alone_and_no_other_key_does():
    own, other = Server(), Server()
    key = {"Authorization": "Bearer of-the-run"}
    async with serving(own, other):
        own.location = f"{other.url}/end"
        allowed = AllowedAddresses(own.url, other.url)
        with sent_with(own.url, key):
            assert headers_to(f"{own.url}/v1") == key
            assert headers_to(other.url) == {}
            async with allowed.client(headers={"authorization": "Bearer of-a-vendor"}) as client:
                await client.get(f"{own.url}/v1")
                await client.get(f"{own.url}/start")
        assert headers_to(own.url) == {}
        async with allowed.client() as client:
            await client.get(own.url)
    keys = [[line for line in head.splitlines() if "bearer" in line.lower()] for head in own.heads]
    assert [[line.rpartition(" ")[2] for line in lines] for lines in keys] == [["of-the-run"]] * 2 + [[]]
    assert "of-the-run" not in "".join(other.heads)


async def test_a_response_that_is_followed_by_hand_is_guarded_too():
    first, stranger = Server(), Server()
    async with serving(first, stranger), AllowedAddresses(first.url).client() as client:
        first.location = f"{stranger.url}/"
        response = await client.get(f"{first.url}/start", follow_redirects=False)
        assert response.next_request is not None
        with pytest.raises(ToolError):
            await client.send(response.next_request)


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    server, proxy = Server(), Server()
    async with serving(server, proxy):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        async with AllowedAddresses(server.url).client() as client:
            await client.get(server.url)
    assert (len(server.heads), len(proxy.heads)) == (1, 0)


async def test_connections_are_used_again_and_closed():
    server = Server()
    async with serving(server):
        async with AllowedAddresses(server.url).client() as client:
            streams = [(await client.get(server.url)).extensions["network_stream"] for _ in range(3)]
            assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1
        assert streams[0].get_extra_info("is_readable"), "closed sockets are readable"


async def test_without_allowed_addresses_nothing_is_reached():
    with pytest.raises(ToolRejected, match="allowed: none"):
        AllowedAddresses().check("http://127.0.0.1/")


@given(
    st.text(max_size=30)
    | st.text(".@[]1%\\#?:\ud800\u3002", max_size=12).map(lambda text: real(f"web://{text}"))
)
def test_any_text_of_a_model_is_allowed_or_a_one_sentence_error(text):
    with pytest.raises(ToolRejected) as rejected:
        raise ToolRejected(f"allowed: {AllowedAddresses(real('web://h')).check(text)}")
    assert len(str(rejected.value)) < 1000
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("address", ["", "localhost:80", "ftp://h/", "web://", "web://[::1", "a b"])
def test_addresses_that_are_none_are_refused_at_the_start(address):
    with pytest.raises(ConfigError, match="write one such as"):
        AllowedAddresses(real(address))


def test_credentials_do_not_belong_into_an_address():
    with pytest.raises(ConfigError, match="give them as headers") as refused:
        AllowedAddresses(real("web://me:secret@h/"))
    assert "secret" not in str(refused.value)


class Chunks(httpx2.AsyncByteStream):
    """6,400 chunks that arrive at once."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(6_400):
            yield b"x"


@pytest.mark.parametrize(("status", "max_bytes"), [(200, 6_399), (200, None), (307, 6_399)])
async def test_bodies_are_bounded_and_leave_turns_to_others(status, max_bytes):
    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = {"location": "/again"} if status == 307 else {}
        return httpx2.Response(status, headers=headers, stream=Chunks())

    url, turns = real("web://127.0.0.1:8000"), 0
    guarded = GuardedTransport(httpx2.MockTransport(answer), AllowedAddresses(url), max_bytes)
    async with httpx2.AsyncClient(transport=guarded) as client:
        fetching = asyncio.create_task(client.get(url))
        while not fetching.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns >= 90
    if (status, max_bytes) == (200, 6_399):
        with pytest.raises(httpx2.DecodingError, match="the reply is longer than 6,399 bytes"):
            await fetching
    else:
        # Of a redirect, 64 KiB are read.
        assert len((await fetching).content) == 6_400
