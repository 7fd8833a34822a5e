"""A stub server: it returns the same canned response to every /generate without delay.

    python -I -S canned.py PORT TOKENS

It imports only the standard library, so that it starts fast and costs little.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

_TOKEN = 7
_LOGPROB = -3.8934
_CONTEXT_LEN = 1 << 20


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
    return {path: _response(json.dumps(body).encode()) for path, body in bodies.items()}


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, responses: dict[bytes, bytes]) -> None:
        self._responses = responses
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (path := self._next_path()) is not None:
            self._transport.write(self._responses[path])

    def _next_path(self) -> bytes | None:
        """Remove one complete request from the buffer and return its path."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._buffer[:end])
        _, has_length, rest = head.lower().partition(b"content-length:")
        size = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if has_length else 0)
        if len(self._buffer) < size:
            return None
        del self._buffer[:size]
        return head.split(b" ", 2)[1]


async def _serve(port: int, tokens: int) -> None:
    by_path = responses(tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(by_path), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
