"""The cost of the recording gateway: CPU time of a request, and the first token of a stream.

The engine answers at once, or at a fixed pace, and costs nothing. Clients are in a thread of their own,
with a connection for each episode and little else; their CPU time is measured, and left out.

    requests   64 and 1,024 episodes at once, of four turns: through the gateway; as an environment, whose
               turns are rendered, parsed and recorded as well; and the policy called directly
    long       a case that hurts: each request has the whole of a conversation, whose tool answers much
    streams    the time from a request to its first word, less what the engine takes for its first token: of
               streams that begin one after another and run at once, and, to hurt, of such that begin at once
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np

from agentrl.envs import play
from agentrl.envs.dialect import Tags
from agentrl.envs.gateway import HarnessEnv
from agentrl.errors import EngineError
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.tools import inline
from agentrl.types import JSON, Completion, Ending, Finish, Limits, Task
from agentrl.types.seams import Policy, Sampling, Watch
from benchmarks.compare import figures_of, interleaved
from benchmarks.instant import Player
from benchmarks.library import TASK
from benchmarks.machine import machine
from benchmarks.question import QUESTION
from benchmarks.sections import as_json

_T = TypeVar("_T")
_TOOL: JSON = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}
_WORDS = "the river runs past the castle to the market and the garden " * 4
_NUM_WORDS = 40


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The workload. Frozen.

    sizes: episodes at once. rounds: of the smallest number of episodes, in a repeat. long: calls of a
    conversation, characters of each result, and episodes at once. streams: at once. first_s, next_s: what the
    engine takes for the first token, and for each later one.
    """

    sizes: tuple[int, ...] = (64, 1024)
    rounds: int = 8
    long: tuple[int, int, int] = (63, 2000, 8)
    streams: tuple[int, ...] = (1, 16)
    first_s: float = 0.01
    next_s: float = 0.02
    repeats: int = 5


class _Spent(NamedTuple):
    """cpu_ms: of a request, without its client's. wall_s: of all."""

    cpu_ms: float
    wall_s: float


def bench_gateway(load: GatewayLoad | None = None) -> dict[str, JSON]:
    """Run all sections, one after the other.

    Returns:
        summary: medians. sections: by section and side, the median, its spread and every repeat.
        settings: the workload and the machine.
    """
    load = load or GatewayLoad()
    with _client_thread() as clients:
        return asyncio.run(_bench(load, clients))


async def _bench(load: GatewayLoad, clients: _Clients) -> dict[str, JSON]:
    sections: dict[str, dict[str, Sequence[float]]] = {
        "cpu_ms": {},
        "requests_per_wall_s": {},
        "first_ms": {},
    }
    for size in load.sizes:
        rounds = max(load.rounds * min(load.sizes) // size, 1)
        await _add_requests(sections, f"{size}", _Episodes(Player(), clients, size, rounds), load)
    calls, payload, size = load.long
    long = _Episodes(Player(calls=calls, payload=payload), clients, size, 1)
    await _add_requests(sections, f"{calls + 1} turns of {payload} characters", long, load)
    streams = {
        f"{number} streams{when}": partial(_first_words, number, apart_s, load, clients)
        for number in load.streams
        for when, apart_s in ((", one after another", load.next_s * 2), (", at once", 0.0))
    }
    for side, runs in (await interleaved(streams, repeats=load.repeats)).items():
        sections["first_ms"][side] = [statistics.median(late) for late in runs]
    figures = {
        name: {side: figures_of(runs) for side, runs in sides.items()} for name, sides in sections.items()
    }
    return {
        "summary": {
            name: {side: round(one.median, 3) for side, one in sides.items()}
            for name, sides in figures.items()
        },
        "sections": {name: {side: one._asdict() for side, one in s.items()} for name, s in figures.items()},
        "settings": {"gateway": as_json(asdict(load)), "machine": machine()},
    }


async def _add_requests(
    sections: dict[str, dict[str, Sequence[float]]], name: str, episodes: _Episodes, load: GatewayLoad
) -> None:
    sides: Mapping[str, Callable[[], Awaitable[_Spent]]] = {
        "gateway": episodes.through_gateway,
        "environment": episodes.as_environment,
        "direct": episodes.direct,
    }
    for side, runs in (await interleaved(sides, repeats=load.repeats)).items():
        sections["cpu_ms"][f"{name}, {side}"] = [run.cpu_ms for run in runs]
        if side == "gateway":
            rates = [episodes.num_requests / run.wall_s for run in runs]
            sections["requests_per_wall_s"][f"{name}, {side}"] = rates


class _Asked(HarnessEnv):
    """An agent that is somewhere else."""

    dialect = Tags()
    limits = Limits(max_turns=4096, max_tokens=None, reset_timeout_s=None, step_timeout_s=None)

    def __init__(self, ask: Callable[[str, str], Awaitable[str]]) -> None:
        super().__init__()
        self._ask = ask

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        del split
        return [TASK]

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """The answer of its client."""
        del task
        return await self._ask(base_url, key)

    @inline
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """Every answer is right."""
        del task, answer, files
        return 1.0


class _Episodes:
    """Episodes of a player's turns, `size` at once, `rounds` times."""

    def __init__(self, player: Player, clients: _Clients, size: int, rounds: int) -> None:
        self._player, self._clients, self._size, self._rounds = player, clients, size, rounds
        self._turns = player.engine.calls + 1
        self._renderer = InlineRenderer(player.tokenizer, Tags())
        self.num_requests = size * rounds * self._turns

    async def through_gateway(self) -> _Spent:
        """Clients ask for every turn."""
        texts = count()

        def result() -> str:
            return self._player.texts[next(texts) % len(self._player.texts)]

        async def episode(number: int) -> None:
            env = _Asked(lambda url, key: self._clients.run(_converse(url, key, result)))
            await _played(env, self._player.engine, self._renderer, f"g{number}", self._turns)

        return await self._spent(partial(_each, episode, self._size))

    async def as_environment(self) -> _Spent:
        """The same turns of an environment of this package."""

        async def all_of_them() -> None:
            await self._player.play(self._size)

        return await self._spent(all_of_them)

    async def direct(self) -> _Spent:
        """The policy alone."""
        prompt, sampling = self._player.encode(QUESTION), Sampling(64)

        async def episode(number: int) -> None:
            for _ in range(self._turns):
                await self._player.engine.generate(prompt, sampling, session=f"d{number}")
            await self._player.engine.close_session(f"d{number}")

        return await self._spent(partial(_each, episode, self._size))

    async def _spent(self, run: Callable[[], Awaitable[None]]) -> _Spent:
        wall, cpu, client = time.perf_counter(), time.process_time(), await self._clients.cpu_s()
        for _ in range(self._rounds):
            await run()
        cpu_s = time.process_time() - cpu - (await self._clients.cpu_s() - client)
        return _Spent(1e3 * cpu_s / self.num_requests, time.perf_counter() - wall)


async def _each(run: Callable[[int], Awaitable[None]], number: int) -> None:
    await asyncio.gather(*map(run, range(number)))


async def _played(env: _Asked, policy: Policy, renderer: InlineRenderer, id: str, turns: int) -> None:
    agent = TokenAgent(policy, renderer, SamplingSettings(max_response_len=64), renderer.bounded)
    episode = await play(env, agent, TASK, episode_id=id)
    if episode.ending is not Ending.COMPLETED or len(episode.turns) != turns or len(episode.trajectories) > 1:
        raise EngineError(f"episode {id} was not played as it should be: {episode}")


class Paced:
    """A policy that samples some words at a pace, and shows each token. firsts: by session, how long its
    first token took (seconds)."""

    version = 0

    def __init__(self, ids: Sequence[int], load: GatewayLoad) -> None:
        self._ids, self._load = ids, load
        self._watches: dict[str, Watch] = {}
        self.firsts: dict[str, float] = {}

    @contextmanager
    def watched(self, session: str, watch: Watch) -> Iterator[None]:
        """Tell `watch` each token."""
        self._watches[session] = watch
        try:
            yield
        finally:
            del self._watches[session]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The words."""
        del prompt_ids, sampling
        began = time.perf_counter()
        for number, token in enumerate(self._ids):
            await asyncio.sleep(self._load.next_s if number else self._load.first_s)
            self.firsts.setdefault(session, time.perf_counter() - began)
            self._watches[session]([token])
        ids = np.array(self._ids, np.int32)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), np.zeros_like(ids), Finish.STOP)

    async def close_session(self, session: str) -> None:
        """Nothing is kept."""


async def _first_words(number: int, apart_s: float, load: GatewayLoad, clients: _Clients) -> list[float]:
    """How much later than the engine's first token the first word of each stream is read (ms).

    apart_s: between the beginnings of two streams (seconds).
    """
    player = Player()
    policy, renderer = (
        Paced(player.encode(_WORDS)[:_NUM_WORDS], load),
        InlineRenderer(player.tokenizer, Tags()),
    )
    firsts: dict[str, float] = {}

    async def episode(id: str) -> None:
        async def ask(url: str, key: str) -> str:
            firsts[id] = await clients.run(_first_word(url, key))
            return ""

        await _played(_Asked(ask), policy, renderer, id, 1)

    async def later(one: int) -> None:
        await asyncio.sleep(apart_s * one)
        await episode(f"s{one}")

    await asyncio.gather(*map(later, range(number)))
    return [1e3 * (firsts[id] - policy.firsts[id]) for id in firsts]


class _Clients:
    """An event loop in a thread of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def run(self, work: Awaitable[_T]) -> _T:
        """What this work comes to there."""

        async def run() -> _T:
            return await work

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    async def cpu_s(self) -> float:
        """The CPU time of the thread so far (seconds)."""

        async def now() -> float:
            return time.thread_time()

        return await self.run(now())


@contextmanager
def _client_thread() -> Iterator[_Clients]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield _Clients(loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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
            raise EngineError(f"the gateway answered {head.decode()}")
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


async def _converse(base_url: str, key: str, result: Callable[[], str]) -> str:
    """Ask until a reply calls no tool; its text."""
    messages: list[JSON] = [{"role": "user", "content": QUESTION}]
    async with _connected(base_url, key) as connection:
        while True:
            length = await connection.post({"model": "m", "messages": messages, "tools": [_TOOL]})
            message = json.loads(await connection.reader.readexactly(length))["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            ids = [call["id"] for call in message["tool_calls"]]
            messages += [{"role": "tool", "tool_call_id": id, "content": result()} for id in ids]


async def _first_word(base_url: str, key: str) -> float:
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
        raise EngineError("a stream had no word")
    return first
