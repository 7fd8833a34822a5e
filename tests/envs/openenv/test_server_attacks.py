"""Hostile clients of a served environment: floods, long messages, and sockets that are held."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.server import ServerProtocol

from agentrl.envs.openenv.server import application_of
from agentrl.envs.openenv.sessions import ServedSessions, ServedWorld
from agentrl.http import serving as http
from agentrl.http.serving import RequestChecks
from tests.envs.openenv.served import Adding, serving, session, until

KEY = "AAAAAAAAAAAAAAAAAAAAAA=="


def upgrade(url):
    host = url.removeprefix("http://")
    lines = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {KEY}",
    )
    return "\r\n".join(["GET /ws HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


async def connected(url):
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def masked(text, opcode=1):
    """A frame of a client; all of its masks are zero."""
    assert len(text) < 126
    return bytes([0x80 | opcode, 0x80 | len(text)]) + bytes(4) + text


async def reply_of(reader):
    """The content of one frame of at most 64 KiB."""
    _, length = await reader.readexactly(2)
    if length == 126:
        length = int.from_bytes(await reader.readexactly(2), "big")
    return json.loads(await reader.readexactly(length))


async def test_a_session_outlives_the_deadline_of_its_handshake(monkeypatch):
    monkeypatch.setattr(http, "_HEAD_TIMEOUT_S", 0.2)
    async with serving() as (_, url):
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            reader, writer = await connected(url)
            if before:
                writer.write(before)
                await reader.readuntil(b'"healthy"}')
            writer.write(upgrade(url))
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.4)
            writer.write(masked(b'{"type": "state"}'))
            assert (await reply_of(reader))["type"] == "state"
            writer.close()
        # Without a handshake, it is closed.
        reader, writer = await connected(url)
        writer.write(upgrade(url)[:-2])
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_message_that_is_too_long_ends_its_session_alone():
    async with serving() as (sessions, url), session(url) as other:
        await other.ask("reset", seed=0)
        async with session(url) as one:
            with pytest.raises(ConnectionClosed) as closed:
                await one.raw("x" * (http.MAX_FRAME_BYTES + 1))
            assert closed.value.rcvd.code == 1009
        assert (await other.ask("step", message="1"))["data"]["reward"] == 1.0
        async with asyncio.timeout(10):
            while len(sessions) > 1:
                await asyncio.sleep(0.01)


async def test_bytes_are_no_message():
    async with serving() as (_, url), session(url) as one:
        await one.socket.send(b"{}")
        assert (await one.read())["data"]["code"] == "INVALID_JSON"


async def test_pings_do_not_hold_the_event_loop_and_unread_answers_fill_no_memory(monkeypatch):
    sizes, receive = [], ServerProtocol.receive_data

    def counted(protocol, data):
        sizes.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(ServerProtocol, "receive_data", counted)
    async with serving() as (_, url), session(url) as other:
        reader, writer = await connected(url)
        writer.write(upgrade(url))
        await reader.readuntil(b"\r\n\r\n")
        # Nothing of the answers is read: the buffers of both sides fill, and no more is taken.
        reader._transport.pause_reading()
        writer.write(masked(b"x" * 125, 9) * 300_000)
        await asyncio.sleep(0.5)
        assert (await other.ask("reset", seed=0))["type"] == "observation"
        assert max(sizes) <= 8192
        taken = -1
        while sum(sizes) != taken:
            taken = sum(sizes)
            await asyncio.sleep(0.5)
        # Of 39 MB; a server that answers all of them takes all of them.
        assert taken < 20 << 20
        writer.transport.abort()


async def test_messages_that_are_sent_ahead_are_answered_in_order():
    async with serving() as (_, url), session(url) as one:
        await one.socket.send('{"type": "reset", "data": {"seed": 0}}')
        for number in range(3):
            call = {"type": "call_tool", "tool_name": "add", "arguments": {"a": number, "b": 0}}
            await one.socket.send(json.dumps({"type": "step", "data": call}))
        assert (await one.read())["data"]["observation"]["text"] == "What is 0 + 1?"
        assert [(await one.read())["data"]["observation"]["result"] for _ in range(3)] == ["0", "1", "2"]


class Released(Adding):
    """Its step waits until it is released."""

    released = asyncio.Event()

    async def step(self, action):
        await Released.released.wait()
        return await super().step(action)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("turns", range(12))
async def test_a_client_may_go_at_the_moment_of_its_answer(is_first, turns):
    """Whatever comes first, and however many turns of the event loop lie between: nothing is raised."""
    app = application_of(sessions := ServedSessions(ServedWorld(Released), 4, 600.0), RequestChecks())
    arriving, is_gone, answers = asyncio.Queue(), asyncio.Event(), []
    arriving.put_nowait({"type": "websocket.connect"})

    async def send(message):
        if is_gone.is_set():
            raise OSError("as uvicorn does")
        answers.append(message)

    async def turn():
        for _ in range(turns):
            await asyncio.sleep(0)

    def go():
        is_gone.set()
        arriving.put_nowait({"type": "websocket.disconnect", "code": 1006})

    Released.released = asyncio.Event()
    scope = {"type": "websocket", "path": "/ws", "headers": [(b"host", b"localhost")], "query_string": b""}
    serving = asyncio.create_task(app(scope, arriving.get, send))
    for text in ('{"type": "reset", "data": {"seed": 0}}', '{"type": "step", "data": {"message": "1"}}'):
        arriving.put_nowait({"type": "websocket.receive", "text": text})
    await until(lambda: len(answers) == 2)
    for act in (go, Released.released.set) if is_first else (Released.released.set, go):
        act()
        await turn()
    await asyncio.wait_for(serving, 10)
    assert not len(sessions)
    assert not Adding.open_


@pytest.mark.parametrize("in_parts", [False, True])
async def test_what_is_no_handshake_is_answered_and_closed(in_parts):
    """A line is longer than a WebSocket takes, and shorter than HTTP does; or the key is none."""
    async with serving() as (_, url):
        for wrong, status in ((f"X: {'a' * 10_000}", b" 431 "), ("Sec-WebSocket-Key: none", b" 400 ")):
            reader, writer = await connected(url)
            head = upgrade(url).replace(f"Sec-WebSocket-Key: {KEY}".encode(), wrong.encode())
            for part in (head[:40], head[40:]) if in_parts else (head,):
                writer.write(part)
                await asyncio.sleep(0.05)
            assert status in await asyncio.wait_for(reader.read(), 10)
