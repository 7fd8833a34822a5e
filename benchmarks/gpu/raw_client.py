"""A raw HTTP client of a server: the requests of the same episodes, and nothing else."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from agentrl.errors import EngineError
from agentrl.types import JSON

_LENGTH = re.compile(rb"content-length: *(\d+)")
_IDS = 500


class RawClient:
    """One connection for each episode, kept alive; it reads the JSON of a reply, and counts its tokens.

    lengths: of the prompts, turn by turn (tokens). new: sampled in each turn (tokens). end: stands for the
    last tokens of a turn in later prompts, as in those of the generator: a server's cache has others there.
    """

    def __init__(self, url: str, lengths: Sequence[int], new: int, end: Sequence[int]) -> None:
        self._at = urlsplit(url)
        self._lengths, self._new, self._end = lengths, new, [*end]
        # All episodes open with the same prompt, as those of one task do.
        self._opening: list[int] = np.random.default_rng(3).integers(0, _IDS, lengths[0]).tolist()

    async def play(self, episodes: int, salt: str) -> int:
        """Play this number of episodes at once; the tokens that were sampled."""
        return sum(await asyncio.gather(*(self._episode(number, salt) for number in range(episodes))))

    async def _episode(self, number: int, salt: str) -> int:
        reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port, limit=1 << 24)
        rng, ids, tokens = np.random.default_rng(number), [*self._opening], 0
        try:
            for length in self._lengths:
                # What the environment writes between two turns.
                ids += rng.integers(0, _IDS, max(length - len(ids), 0)).tolist()
                sampled = await self._turn(reader, writer, ids, salt)
                tokens += len(sampled)
                ids += sampled[: self._new - len(self._end)] + self._end
        finally:
            writer.close()
        return tokens

    async def _turn(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ids: Sequence[int], salt: str
    ) -> list[int]:
        body = json.dumps(_request(ids, self._new, salt)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {self._at.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        size = _LENGTH.search(answer.lower())
        if b" 200 " not in answer.split(b"\r\n")[0] or size is None:
            raise EngineError(f"the server answers a raw request with {answer[:200]!r}")
        reply = json.loads(await reader.readexactly(int(size.group(1))))
        sampled: list[int] = reply["output_ids"]
        return sampled


def _request(ids: Sequence[int], new: int, salt: str) -> dict[str, JSON]:
    """The body of a request as the product's own client sends it."""
    sampling: dict[str, JSON] = {
        "max_new_tokens": new,
        "temperature": 1.0,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    return {
        "rid": uuid.uuid4().hex,
        "input_ids": [*ids],
        "sampling_params": sampling,
        "return_logprob": True,
        "extra_key": salt,
    }
