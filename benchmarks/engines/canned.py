"""A server that costs little: it answers every /generate at once, with the same tokens.

    python -I -S canned.py PORT TOKENS

It imports nothing of agentrl, and the standard library alone: it is to start at once and to be cheap.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

_TOKEN = 7
_LOGPROB = -3.8934
_ROOM = 1 << 20


def answers(tokens: int) -> dict[bytes, bytes]:
    """What is answered to whom, by path."""
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "0",
        "cached_tokens": 0,
        "completion_tokens": tokens,
        "output_token_logprobs": [[_LOGPROB, _TOKEN, None]] * tokens,
    }
    told: dict[bytes, object] = {
        b"/generate": {"text": "", "output_ids": [_TOKEN] * tokens, "meta_info": meta},
        b"/server_info": {"context_length": _ROOM},
        b"/model_info": {"weight_version": "0"},
        b"/health": {},
        b"/abort_request": {},
    }
    return {path: _reply(json.dumps(body).encode()) for path, body in told.items()}


def _reply(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, known: dict[bytes, bytes]) -> None:
        self._known = known
        self._came = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._came += data
        while (path := self._taken()) is not None:
            self._transport.write(self._known[path])

    def _taken(self) -> bytes | None:
        """Take one whole request out of what came; gives its path."""
        end = self._came.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self._came[:end])
        _, named, rest = head.lower().partition(b"content-length:")
        size = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if named else 0)
        if len(self._came) < size:
            return None
        del self._came[:size]
        return head.split(b" ", 2)[1]


async def _serve(port: int, tokens: int) -> None:
    known = answers(tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(known), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
