"""A stub server: it returns the same canned response to every /generate without delay.

    python -I -S canned.py PORT TOKENS

It imports only the standard library, so that it starts fast and costs little.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import cast

_TOKEN = 7
_LOGPROB = -3.8934
_CONTEXT_LEN = 1 << 20
Respond = Callable[[bytes, bytes], bytes]
"""Path and body of a request -> the complete response."""


def responses(tokens: int) -> dict[bytes, bytes]:
    """The HTTP responses by path."""
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "0",
        "cached_tokens": 0,
        "completion_tokens": tokens,
        "output_token_logprobs": [[_LOGPROB, _TOKEN, None]] * tokens,
    }
    bodies: dict[bytes, object] = {
        b"/generate": {"text": "", "output_ids": [_TOKEN] * tokens, "meta_info": meta},
        b"/server_info": {"context_length": _CONTEXT_LEN},
        b"/model_info": {"weight_version": "0"},
        b"/health": {},
        b"/abort_request": {},
    }
    return {path: http_response(json.dumps(body).encode()) for path, body in bodies.items()}


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
    """Serve at PORT responses of TOKENS tokens."""
    port, tokens = map(int, arguments)
    by_path = responses(tokens)
    asyncio.run(serve(port, lambda path, _body: by_path[path]))


if __name__ == "__main__":
    main(sys.argv[1:])
