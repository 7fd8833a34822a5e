"""A server that answers at once, in SGLang's protocol.

    python -m benchmarks.instant_server CALLS [TOKENS STEP_S]

It prints its address, and serves until its standard input ends. The turn of a session follows from its
routing key: CALLS calls of the tool, then the answer, then again. TOKENS: of each turn, at least. STEP_S: it
answers as one that samples a token of every request in each step of so many seconds, all at the same moment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice

from agentrl.engine.sglang import wire
from benchmarks.instant import Player

_INFO = {"context_length": 1 << 20, "max_req_input_len": 1 << 20}


class InstantServer:
    """Answers requests over any number of connections. turns: the tokens of each turn of an episode.

    step_s: of a token (seconds); 0 = it answers at once.
    """

    def __init__(self, turns: Sequence[Sequence[int]], step_s: float = 0.0) -> None:
        self._turns = [(self._reply(ids), len(ids)) for ids in turns]
        self._num_turns = Counter[bytes]()
        self._step_s = step_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
                await reader.readexactly(int(fields.get(b"content-length", b"0")))
                content, num_tokens = self._answer(head.split(b" ", 2)[1], fields)
                if self._step_s and num_tokens:
                    await self._sampled(num_tokens)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _sampled(self, num_tokens: int) -> None:
        """Wait until the end of the last step of a request that arrived in one."""
        now_s = asyncio.get_running_loop().time()
        last = int(now_s / self._step_s) + 1 + num_tokens
        await asyncio.sleep(last * self._step_s - now_s)

    def _answer(self, path: bytes, fields: dict[bytes, bytes]) -> tuple[bytes, int]:
        if path == b"/generate":
            session = fields[wire.ROUTING_KEY.lower().encode()]
            self._num_turns[session] += 1
            return self._turns[(self._num_turns[session] - 1) % len(self._turns)]
        body = {b"/server_info": _INFO, b"/model_info": {"weight_version": "0"}}.get(path, {})
        return json.dumps(body).encode(), 0

    def _reply(self, ids: Sequence[int]) -> bytes:
        meta = {
            "id": "x",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "weight_version": "0",
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return json.dumps({"text": "", "output_ids": list(ids), "meta_info": meta}).encode()


async def main(calls: int, tokens: int = 0, step_s: float = 0.0) -> None:
    """Serve until the standard input ends."""
    player = Player(calls=calls)
    engine, filler = player.engine, player.encode(player.texts[0])
    turns = [
        [*islice(cycle(filler), max(tokens - len(end), 0)), *end] for end in (engine.call, engine.answer)
    ]
    served = InstantServer([*[turns[0]] * calls, turns[1]], step_s)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, limit=1 << 24, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:3]), *map(float, sys.argv[3:])))
