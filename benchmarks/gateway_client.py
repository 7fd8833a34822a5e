"""Clients of the gateway, with a connection for each episode and little else.

    python -m benchmarks.gateway_client

Each line of its standard input is [number, url, key, payload]: a conversation whose tool answers with so many
characters, or, where that is null, a stream. It prints [number, seconds]: of the conversation, or up to the
first word of the stream. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from agentrl.types import JSON
from benchmarks.question import QUESTION, text_of

_TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}


class _Connection(NamedTuple):
    """A connection to the endpoint of an episode. head: of its requests."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes

    async def post(self, body: Mapping[str, JSON]) -> int:
        """Send a request, and read the head of its reply; the length of what follows, 0 = unknown (bytes)."""
        content = json.dumps(body).encode()
        self.writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (self.head, len(content), content))
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the gateway answered {head.decode()}")
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        return int(length or 0)


@asynccontextmanager
async def _connected(base_url: str, key: str) -> AsyncIterator[_Connection]:
    host, _, path = base_url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    try:
        yield _Connection(reader, writer, f"{head}Content-Type: application/json\r\n".encode())
    finally:
        writer.close()


async def converse(base_url: str, key: str, payload: int) -> None:
    """Ask until a reply calls no tool. payload: characters of each result."""
    messages: list[JSON] = [{"role": "user", "content": QUESTION}]
    async with _connected(base_url, key) as connection:
        while True:
            length = await connection.post({"model": "m", "messages": messages, "tools": [_TOOL]})
            message = json.loads(await connection.reader.readexactly(length))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return
            ids = [call["id"] for call in message["tool_calls"]]
            messages += [{"role": "tool", "tool_call_id": id, "content": text_of(payload)} for id in ids]


async def first_word(base_url: str, key: str) -> float:
    """How long the first word of a stream takes, whose end is awaited (seconds)."""
    body: dict[str, JSON] = {
        "model": "m",
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
    }
    first = None
    async with _connected(base_url, key) as connection:
        began = time.perf_counter()
        await connection.post(body)
        while (line := await connection.reader.readline()) and b"[DONE]" not in line:
            if first is None and b'"content"' in line and b'"content": ""' not in line:
                first = time.perf_counter() - began
    if first is None:
        raise RuntimeError("a stream had no word")
    return first


async def _answered(line: bytes) -> None:
    number, url, key, payload = json.loads(line)
    began = time.perf_counter()
    if payload is None:
        seconds = await first_word(url, key)
    else:
        await converse(url, key, payload)
        seconds = time.perf_counter() - began
    print(json.dumps([number, seconds]), flush=True)


async def main() -> None:
    """Run what is asked for, all of it at once."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(_answered(line))


if __name__ == "__main__":
    asyncio.run(main())
