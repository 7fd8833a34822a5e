"""A minimal server of Search-R1's `/retrieve`, written from the protocol's text, without code of agentrl."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager


class Retriever:
    """Finds "contents of QUERY" for every query. behaviours: those of the next requests, then `answer`.

    answer: replies. hang: never replies. drop: closes the connection in mid-reply. An integer: that status.
    A string of JSON: that body. gate: replies wait for it.
    """

    def __init__(self, *behaviours, scores=True, headers=""):
        self.behaviours = list(behaviours)
        self.scores = scores
        self.headers = headers
        self.counts = Counter()
        self.requests: list[dict] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self):
        self.listener = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self.listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            await self.kill()

    async def kill(self):
        """Close everything at once."""
        self.listener.close()
        for writer in list(self.open):
            writer.transport.abort()
        await self.listener.wait_closed()

    async def _connection(self, reader, writer):
        self.counts["connections"] += 1
        self.open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(
                    int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line
                )
                await self._answer(head, json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()

    async def _answer(self, head, request, writer):
        assert head.startswith("POST /retrieve HTTP/1.1\r\n")
        self.counts["requests"] += 1
        self.requests.append(request)
        self.arrived.set()
        await self.gate.wait()
        behaviour = self.behaviours.pop(0) if self.behaviours else "answer"
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "drop":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            raise ConnectionResetError
        status = behaviour if isinstance(behaviour, int) else 200
        body = behaviour if isinstance(behaviour, str) and behaviour != "answer" else self._body(request)
        encoded = body.encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(encoded)}\r\n{self.headers}\r\n".encode() + encoded
        )
        await writer.drain()

    def _body(self, request):
        return json.dumps(
            {
                "result": [
                    [] if q == "nothing" else self._documents(q, request["topk"]) for q in request["queries"]
                ]
            }
        )

    def _documents(self, query, topk):
        documents = [{"id": str(n), "contents": f'"{query}"\ntext {n}'} for n in range(topk)]
        return [{"document": document, "score": 1.0} for document in documents] if self.scores else documents
