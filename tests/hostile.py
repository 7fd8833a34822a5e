"""A server on loopback that attacks its clients, and what an attack costs them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from agentrl.runtime.collector import rare_collections

Answer = Callable[[str, bytes], Iterable[bytes] | None]
"""From the path of a request and its body to what is sent. None = a WebSocket begins."""


@dataclass
class Hostile:
    """A server. requests: the paths that were asked for. num_sent: bytes of its answers so far."""

    port: int
    requests: list[str] = field(default_factory=list)
    num_sent: int = 0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def attacking(answer: Answer, frames: Callable[[bytes], Iterable[bytes]] | None = None) -> Iterator[Hostile]:
    """Serve, one thread for each connection. frames: of a WebSocket, in answer to each message."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Hostile(listener.getsockname()[1])
        connections: list[socket.socket] = []

        def serve(connection: socket.socket) -> None:
            with suppress(OSError, ValueError), connection, connection.makefile("rb") as requests:
                while line := requests.readline():
                    path, headers = line.split()[1].decode(), {}
                    while field := requests.readline().strip():
                        name, _, value = field.partition(b":")
                        headers[name.lower()] = value.strip()
                    body = requests.read(int(headers.get(b"content-length", b"0")))
                    server.requests.append(path)
                    parts = answer(path, body)
                    if parts is None:
                        assert frames is not None, "a server of WebSockets"
                        parts = _websocket(headers[b"sec-websocket-key"], requests, frames)
                    for part in parts:
                        connection.sendall(part)
                        server.num_sent += len(part)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield server
        finally:
            # Also of the listener: its thread waits for the next connection.
            for opened in (listener, *connections):
                with suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)


def replied(body: bytes, kind: str = "application/json") -> list[bytes]:
    """A reply with a length."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return [head.encode(), body]


def redirected(target: str) -> list[bytes]:
    """A redirect."""
    return [f"HTTP/1.1 307 Go\r\nlocation: {target}\r\ncontent-length: 0\r\n\r\n".encode()]


def endless(status: str = "200 OK", *fields: str, chunk: bytes = b"x" * 65_536) -> Iterator[bytes]:
    """A reply of a gigabyte, in chunks."""
    fields = (*fields, "content-type: application/json", "transfer-encoding: chunked")
    head = "\r\n".join((f"HTTP/1.1 {status}", *fields, "", ""))
    yield head.encode()
    framed = b"%x\r\n%b\r\n" % (len(chunk), chunk)
    yield from [framed * max(1, 65_536 // len(framed))] * (2**30 // 65_536)


def frame(payload: bytes, opcode: int = 1) -> bytes:
    """A frame of a WebSocket, unmasked: 1 = text, 9 = ping."""
    length = len(payload)
    if length < 126:
        size = bytes([length])
    elif length < 65_536:
        size = b"\x7e" + struct.pack(">H", length)
    else:
        size = b"\x7f" + struct.pack(">Q", length)
    return bytes([128 | opcode]) + size + payload


def _websocket(
    key: bytes, requests: Iterable[bytes], frames: Callable[[bytes], Iterable[bytes]]
) -> Iterator[bytes]:
    accepted = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    yield b"HTTP/1.1 101 Go\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
    yield accepted + b"\r\n\r\n"
    while (message := _message(requests)) is not None:
        yield from frames(message)


def _message(requests) -> bytes | None:
    """The next text of a client."""
    while len(head := requests.read(2)) == 2:
        length = head[1] & 127
        if length > 125:
            size = 2 if length == 126 else 8
            length = int.from_bytes(requests.read(size), "big")
        mask, masked = requests.read(4), requests.read(length)
        if head[0] & 15 == 1:
            return bytes(byte ^ mask[index % 4] for index, byte in enumerate(masked))
    return None


@dataclass
class Cost:
    """longest_s: CPU seconds of the event loop's longest step, without those of other threads."""

    longest_s: float = 0.0


@contextmanager
def measured(monkeypatch) -> Iterator[Cost]:
    """Measure the steps of the event loop of this thread, the one in which the block ends included.

    As in a run, Python's collector runs rarely: in a large process it takes longer than a flood may.
    """
    cost, thread, began_s = Cost(), threading.get_ident(), time.thread_time()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal began_s
        if threading.get_ident() != thread:
            return run(handle)
        began_s = time.thread_time()
        run(handle)
        cost.longest_s = max(cost.longest_s, time.thread_time() - began_s)
        return None

    with monkeypatch.context() as patch, rare_collections():
        patch.setattr(asyncio.Handle, "_run", timed)
        try:
            yield cost
        finally:
            cost.longest_s = max(cost.longest_s, time.thread_time() - began_s)
