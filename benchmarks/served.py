"""The generator beside a server, against a plain client that sends the same requests.

Every episode has three calls of a tool and an answer, whose end stands for what the model would write: a
server samples whatever it samples, and the last tokens of each turn are replaced. The plain client keeps one
connection for each episode, writes and reads JSON with the standard library, and does nothing else.

    instant    a server that answers at once: the CPU time of a request, in the driver
    steps      one that ends hundreds of turns in the same moment, every step 10 ms: the loss of throughput
    --url      a server that runs already, such as SGLang on a GPU: both
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import uuid
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from agentrl.engine.sglang import SGLangPolicy, wire
from agentrl.errors import EngineError
from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON, Completion, Finish, Task
from agentrl.types.seams import Policy, Sampling
from benchmarks import instant_server
from benchmarks.compare import Duration, Figures, figures_of, timed
from benchmarks.instant import Player, texts_of
from benchmarks.question import ANSWER, QUESTION

GENERATOR, PLAIN = "generator", "plain client"
_CALLS = 3
_TURNS = _CALLS + 1
_FIRST_PLAIN_ID = 16
"""The special tokens of the tokenizer have lower ids."""


@dataclass(frozen=True, slots=True)
class Load:
    """Episodes at once (count). tokens: of each turn. prompt: characters of the first prompt.

    step_s: of the server's steps (seconds); 0 = it answers at once.
    """

    episodes: int
    tokens: int = 128
    prompt: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """The workload. Frozen. loads: by name. payload: characters of each tool result."""

    loads: tuple[tuple[str, Load], ...] = (
        ("256", Load(256)),
        ("1024", Load(1024)),
        ("1024 of 8 tokens", Load(1024, 8)),
        ("64 with prompts of 8k tokens", Load(64, 128, 48_000)),
        ("256 in steps", Load(256, step_s=0.01)),
        ("1024 in steps", Load(1024, step_s=0.02)),
    )
    payload: int = 120
    repeats: int = 5


class Scripted:
    """A policy whose turns end in calls of the tool, and then in the answer.

    prompts: the length of the prompt of each turn of an episode, as far as it has been played (tokens).
    """

    def __init__(self, policy: SGLangPolicy, call: Sequence[int], answer: Sequence[int], tokens: int) -> None:
        self._policy, self._tokens = policy, tokens
        self._call, self._answer = np.array(call, np.int32), np.array(answer, np.int32)
        self._num_turns: dict[str, int] = {}
        self.prompts = [0] * _TURNS

    @property
    def version(self) -> int:
        """That of the server."""
        return self._policy.version

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The server's turn, with another end."""
        turn = self._num_turns.get(session, 0)
        self._num_turns[session] = turn + 1
        self.prompts[turn] = len(prompt_ids)
        plain = replace(sampling, max_new_tokens=self._tokens, stop=(), stop_token_ids=(), seed=None)
        sampled = await self._policy.generate(prompt_ids, plain, session=session)
        if len(sampled.token_ids) != self._tokens:
            raise EngineError(f"the server sent {len(sampled.token_ids)} tokens, not {self._tokens}.")
        end = self._call if turn < _CALLS else self._answer
        # A model may sample the tags of the dialect by chance.
        begin = np.maximum(sampled.token_ids[: -len(end)], _FIRST_PLAIN_ID)
        ids = np.concatenate([begin, end])
        return Completion(ids, sampled.logprobs, sampled.versions, Finish.STOP, int(end[-1]))

    async def close_session(self, session: str) -> None:
        """Forget a session."""
        self._num_turns.pop(session, None)
        await self._policy.close_session(session)


class _Asking(Player):
    """Asks after `prompt` characters, which are others for each group."""

    def __init__(self, prompt: int, payload: int, policy: Policy) -> None:
        super().__init__(payload=payload, calls=_CALLS, policy=policy)
        self._openings = texts_of(prompt) if prompt else [""]

    def task(self, index: int) -> Task:
        """The task of a group."""
        opening = self._openings[index % len(self._openings)]
        return Task.ask(f"t{index}", f"{opening} {QUESTION}".strip(), answer=ANSWER)


class Sides:
    """Both sides against one server: episodes and requests of the same lengths, at the same time."""

    def __init__(self, url: str, load: Load, payload: int) -> None:
        self._url, self._load = url, load
        self._salts = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count())
        self._policy: Scripted | None = None
        self._player = _Asking(load.prompt, payload, self)
        self.prompts: list[int] = []

    @property
    def version(self) -> int:
        """Of the policy."""
        return self._current.version

    @property
    def _current(self) -> Scripted:
        assert self._policy is not None, "episodes are played by `generator`"
        return self._policy

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """See `Policy`."""
        return await self._current.generate(prompt_ids, sampling, session=session)

    async def close_session(self, session: str) -> None:
        """See `Policy`."""
        await self._current.close_session(session)

    async def generator(self) -> None:
        """Play the episodes, with new connections and nothing of theirs in the server's cache."""
        policy = SGLangPolicy(self._url, max_concurrency=self._load.episodes)
        policy.salt = next(self._salts)
        engine = self._player.engine
        self._policy = Scripted(policy, engine.call, engine.answer, self._load.tokens)
        try:
            with rare_collections():
                await self._player.play(self._load.episodes)
        finally:
            await policy.close()
        self.prompts = self._policy.prompts

    async def plain(self) -> None:
        """Send as many requests, with prompts of the same lengths, over a connection for each episode."""
        salt, at = next(self._salts), urlsplit(self._url)
        rng = np.random.default_rng(3)
        opening, grown = rng.integers(0, 256, self.prompts[0]).tolist(), np.diff(self.prompts)
        world = [rng.integers(0, 256, int(number) - self._load.tokens).tolist() for number in grown]
        rules = {"max_new_tokens": self._load.tokens, "temperature": 1.0}
        rules |= {"skip_special_tokens": False, "no_stop_trim": True}

        async def play(number: int) -> None:
            reader, writer = await asyncio.open_connection(at.hostname, at.port, limit=1 << 22)
            ids = list(opening)
            for turn in range(_TURNS):
                request = {"rid": uuid.uuid4().hex, "input_ids": ids, "sampling_params": rules}
                body = json.dumps({**request, "return_logprob": True, "extra_key": salt}).encode()
                head = f"POST /generate HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Type: application/json\r\n"
                head += f"{wire.ROUTING_KEY}: {salt}-{number}\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                ids += (await _reply(reader))["output_ids"]
                ids += world[turn] if turn < _CALLS else []
            writer.close()

        await asyncio.gather(*(play(number) for number in range(self._load.episodes)))


async def _reply(reader: asyncio.StreamReader) -> dict[str, list[int]]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: *(\d+)", head)
    if length is None or b" 200 " not in head.split(b"\r\n")[0]:
        raise EngineError(f"the server answered {head[:80]!r}.")
    reply: dict[str, list[int]] = json.loads(await reader.readexactly(int(length[1])))
    return reply


async def bench_served(settings: Served, url: str | None) -> dict[str, dict[str, JSON]]:
    """Figures of each load by name; with `url`, of those without steps, against that server.

    Returns:
        ratio: requests a second over those of the plain client. cpu_ms: of the driver, a request. Each side
        has the medians, their spreads and every repeat.
    """
    figures = {}
    for name, load in settings.loads:
        if url is None:
            async with _instant(load) as own:
                figures[name] = await _measured(Sides(own, load, settings.payload), load, settings.repeats)
        elif not load.step_s:
            figures[name] = await _measured(Sides(url, load, settings.payload), load, settings.repeats)
    return figures


async def _measured(sides: Sides, load: Load, repeats: int) -> dict[str, JSON]:
    await sides.generator()  # the plain client takes the lengths of its prompts
    runs = await timed({GENERATOR: sides.generator, PLAIN: sides.plain}, repeats=repeats)
    rows = {side: _row(durations, load) for side, durations in runs.items()}
    ratio = rows[GENERATOR]["requests_per_s"].median / rows[PLAIN]["requests_per_s"].median
    by_side: dict[str, JSON] = {
        side: {name: figures._asdict() for name, figures in row.items()} for side, row in rows.items()
    }
    return {
        "ratio": ratio,
        "cpu_ms": {side: row["cpu_ms"].median for side, row in rows.items()},
        "requests_per_s": {side: row["requests_per_s"].median for side, row in rows.items()},
        "tokens_per_s": rows[GENERATOR]["requests_per_s"].median * load.tokens,
        "prompts": [*sides.prompts],
        "load": {**asdict(load)},
        "sides": by_side,
    }


def _row(durations: Sequence[Duration], load: Load) -> dict[str, Figures]:
    requests = load.episodes * _TURNS
    return {
        "requests_per_s": figures_of([requests / run.wall_s for run in durations]),
        "cpu_ms": figures_of([1e3 * run.cpu_s / requests for run in durations]),
    }


@asynccontextmanager
async def _instant(load: Load) -> AsyncIterator[str]:
    """A server of its own process, during the block; its address."""
    arguments = [str(_CALLS), str(load.tokens), str(load.step_s)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", instant_server.__name__, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        cwd=Path(__file__).parents[1],
    )
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()
