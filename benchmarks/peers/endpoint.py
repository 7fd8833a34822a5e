"""A chat endpoint that costs nothing: every reply is precomputed, and follows from the request's messages.

    python -m benchmarks.peers.endpoint PORT CALLS

With fewer than CALLS tool results in a conversation the reply calls the tool `look`; then it is the answer.
Requests with `stream` get the same as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import cast

from benchmarks.question import ANSWER

# No text of the benchmark contains it, and of the messages only tool results do.
_TOOL_RESULT = b'"tool_call_id"'
_STREAMED = re.compile(rb'"stream":\s*true')
_USAGE = {"prompt_tokens": 64, "completion_tokens": 16, "total_tokens": 80}
_PATH = b"/v1/chat/completions"
Respond = Callable[[bytes, bytes], bytes]
"""Path and body of a request -> the complete response."""


class Replies:
    """The responses of one endpoint. calls: tool calls before the answer (count)."""

    def __init__(self, calls: int) -> None:
        turns: list[dict[str, object]] = [{"tool_calls": [_call(number)]} for number in range(calls)]
        turns.append({"content": ANSWER})
        self._complete = [_completion(turn) for turn in turns]
        self._streamed = [_events(turn) for turn in turns]
        self._other = http_response(b"{}")

    def respond(self, path: bytes, body: bytes) -> bytes:
        """The response to a request; an empty object for other paths than that of chat completions."""
        if path != _PATH:
            return self._other
        replies = self._complete if _STREAMED.search(body) is None else self._streamed
        return replies[min(body.count(_TOOL_RESULT), len(replies) - 1)]


def _call(number: int) -> dict[str, object]:
    function = {"name": "look", "arguments": '{"where": "tower"}'}
    return {"index": 0, "id": f"call_{number}", "type": "function", "function": function}


def _completion(turn: dict[str, object]) -> bytes:
    message = {"role": "assistant", "content": None, **turn}
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(turn)}
    body = {**_head("chat.completion"), "choices": [choice], "usage": _USAGE}
    return http_response(json.dumps(body).encode())


def _events(turn: dict[str, object]) -> bytes:
    head = _head("chat.completion.chunk")
    deltas = [({"role": "assistant", **turn}, None), ({}, _finish_reason(turn))]
    choices = [{"index": 0, "delta": delta, "finish_reason": reason} for delta, reason in deltas]
    chunks = [
        *({**head, "choices": [choice]} for choice in choices),
        {**head, "choices": [], "usage": _USAGE},
    ]
    lines = [*map(json.dumps, chunks), "[DONE]"]
    return http_response("".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")


def _head(kind: str) -> dict[str, object]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "instant"}


def _finish_reason(turn: dict[str, object]) -> str:
    return "tool_calls" if "tool_calls" in turn else "stop"


def http_response(body: bytes, content_type: str = "application/json") -> bytes:
    """A complete response with status 200."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Connection(asyncio.Protocol):
    """Answers the requests of one connection in their order."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._buffer += data
        while (request := self._next_request()) is not None:
            self._transport.write(self._respond(*request))

    def _next_request(self) -> tuple[bytes, bytes] | None:
        """Remove one complete request from the buffer and return its path and its body."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._buffer[:end])
        _, has_length, rest = head.lower().partition(b"content-length:")
        size = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if has_length else 0)
        if len(self._buffer) < size:
            return None
        body = bytes(self._buffer[end + 4 : size])
        del self._buffer[:size]
        return head.split(b" ", 2)[1], body


async def serve(port: int, respond: Respond) -> None:
    """Serve at a port of this machine, until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(respond), "127.0.0.1", port)
    await server.serve_forever()


def main(arguments: list[str]) -> None:
    """Serve at PORT, until the process ends."""
    port, calls = map(int, arguments)
    asyncio.run(serve(port, Replies(calls).respond))


if __name__ == "__main__":
    main(sys.argv[1:])
