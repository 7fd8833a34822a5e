"""A server that answers at once, in SGLang's protocol.

    python -m benchmarks.instant_server CALLS

It prints its address, and serves until its standard input ends. The turn of a session follows from its
routing key: CALLS calls of the tool, then the answer, then again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence

from agentrl.engine.sglang import wire
from benchmarks.instant import Player

_INFO = {"context_length": 1 << 20, "max_req_input_len": 1 << 20}


class InstantServer:
    """Answers requests over any number of connections. turns: the tokens of each turn of an episode."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self._turns = [self._reply(ids) for ids in turns]
        self._num_turns = Counter[bytes]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
                await reader.readexactly(int(fields.get(b"content-length", b"0")))
                content = self._answer(head.split(b" ", 2)[1], fields)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, path: bytes, fields: dict[bytes, bytes]) -> bytes:
        if path == b"/generate":
            session = fields[wire.ROUTING_KEY.lower().encode()]
            self._num_turns[session] += 1
            return self._turns[(self._num_turns[session] - 1) % len(self._turns)]
        body = {b"/server_info": _INFO, b"/model_info": {"weight_version": "0"}}.get(path, {})
        return json.dumps(body).encode()

    def _reply(self, ids: Sequence[int]) -> bytes:
        meta = {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "weight_version": "0",
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return json.dumps({"text": "", "output_ids": list(ids), "meta_info": meta}).encode()


async def main(calls: int) -> None:
    """Serve until the standard input ends."""
    engine = Player(calls=calls).engine
    served = InstantServer([*[engine.call] * calls, engine.answer])
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, limit=1 << 24, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
