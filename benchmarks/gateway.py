"""The cost of the recording gateway: CPU time of a request, and the first token of a stream.

The engine answers at once, or at a fixed pace, and costs nothing. Clients are a process of their own
(`benchmarks.gateway_client`).

    requests   64 and 1,024 episodes at once, of four turns: through the gateway; as an environment, whose
               turns are rendered, parsed and recorded as well; and the policy called directly
    long       a case that hurts: each request has the whole of a conversation, whose tool answers much
    streams    the time from a request to its first word, less what the engine takes for its first token: of
               streams that begin one after another, and, to hurt, of such that begin in the same moment;
               against a server that sends each token of the engine, and does nothing else
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

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

_WORDS = "the river runs past the castle to the market and the garden " * 4
_NUM_WORDS = 20


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """The workload. Frozen.

    sizes: episodes at once. rounds: of the smallest number of episodes, in a repeat. long: calls of a
    conversation, characters of each result, and episodes at once. streams: at once. num_streams: of each
    such number, in a repeat. first_s, next_s: what the engine takes for the first token, and for each later
    one.
    """

    sizes: tuple[int, ...] = (64, 1024)
    rounds: int = 8
    long: tuple[int, int, int] = (63, 2000, 8)
    streams: tuple[int, ...] = (1, 16)
    num_streams: int = 32
    first_s: float = 0.01
    next_s: float = 0.02
    repeats: int = 5


class _Spent(NamedTuple):
    """cpu_ms: of a request, in this process. wall_s: of all."""

    cpu_ms: float
    wall_s: float


def bench_gateway(load: GatewayLoad | None = None) -> dict[str, JSON]:
    """Run all sections, one after the other.

    Returns:
        summary: medians. sections: by section and side, the median, its spread and every repeat.
        settings: the workload and the machine.
    """
    return asyncio.run(_bench(load or GatewayLoad()))


async def _bench(load: GatewayLoad) -> dict[str, JSON]:
    async with client_process() as clients:
        sections = await _measured(load, clients)
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


async def _measured(load: GatewayLoad, clients: Clients) -> dict[str, dict[str, Sequence[float]]]:
    sections: dict[str, dict[str, Sequence[float]]] = {
        "cpu_ms": {},
        "requests_per_wall_s": {},
        "first_ms": {},
    }
    for size in load.sizes:
        rounds = max(load.rounds * min(load.sizes) // size, 1)
        await _add_requests(sections, f"{size}", _Episodes(clients, size, rounds=rounds), load)
    calls, payload, size = load.long
    long = _Episodes(clients, size, calls=calls, payload=payload)
    await _add_requests(sections, f"{calls + 1} turns of {payload} characters", long, load)
    length_s = load.first_s + load.next_s * (_NUM_WORDS - 1)
    most = max(load.streams)
    cases = {f"{number} at once": (load.num_streams, length_s / number) for number in load.streams}
    cases[f"{most} that begin together"] = (most, 0.0)
    streams = {
        f"{case}, {side}": partial(_first_words, number, apart_s, load, asks(clients))
        for case, (number, apart_s) in cases.items()
        for side, asks in (("gateway", _GatewayStream), ("bare server", _BareStream))
    }
    for side, runs in (await interleaved(streams, repeats=load.repeats)).items():
        sections["first_ms"][side] = [statistics.median(late) for late in runs]
    return sections


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

    def __init__(self, ask: Callable[[str, str], Awaitable[None]]) -> None:
        super().__init__()
        self._ask = ask

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        del split
        return [TASK]

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """None: its client keeps it."""
        del task
        await self._ask(base_url, key)
        return None

    @inline
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """Every answer is right."""
        del task, answer, files
        return 1.0


class _Episodes:
    """Episodes of a player's turns, `size` at once, `rounds` times."""

    def __init__(
        self, clients: Clients, size: int, *, rounds: int = 1, calls: int = 3, payload: int = 40
    ) -> None:
        self._clients, self._size, self._rounds, self._payload = clients, size, rounds, payload
        self._player = player = Player(calls=calls, payload=payload)
        self._turns = player.engine.calls + 1
        self._renderer = InlineRenderer(player.tokenizer, Tags())
        self.num_requests = size * rounds * self._turns

    async def through_gateway(self) -> _Spent:
        """Clients ask for every turn."""

        async def ask(url: str, key: str) -> None:
            await self._clients.run(url, key, self._payload)

        async def episode(number: int) -> None:
            await _played(_Asked(ask), self._player.engine, self._renderer, f"g{number}", self._turns)

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
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._rounds):
            await run()
        cpu_ms = 1e3 * (time.process_time() - cpu) / self.num_requests
        return _Spent(cpu_ms, time.perf_counter() - wall)


async def _each(run: Callable[[int], Awaitable[None]], number: int) -> None:
    await asyncio.gather(*map(run, range(number)))


async def _played(env: _Asked, policy: Policy, renderer: InlineRenderer, id: str, turns: int) -> None:
    agent = TokenAgent(policy, renderer, SamplingSettings(max_response_len=64), renderer.bounded)
    episode = await play(env, agent, TASK, episode_id=id)
    if episode.ending is not Ending.COMPLETED or len(episode.turns) != turns or len(episode.trajectories) > 1:
        raise EngineError(f"episode {id} was not played as it should be: {episode}")


class Paced:
    """A policy that samples some words at a pace, and shows each token.

    renderer: of its tokens. firsts: by session, how long its first token took (seconds).
    """

    version = 0

    def __init__(self, load: GatewayLoad) -> None:
        player = Player()
        self._ids, self._load = player.encode(_WORDS)[:_NUM_WORDS], load
        self.renderer = InlineRenderer(player.tokenizer, Tags())
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


_Stream = Callable[[Paced, str], Awaitable[float]]
"""Has a client read a stream of a policy in a session; how long its first word took (seconds)."""


async def _first_words(number: int, apart_s: float, load: GatewayLoad, stream: _Stream) -> list[float]:
    """How much later than the engine's first token the first word of each stream is read (ms).

    apart_s: between the beginnings of two streams (seconds).
    """
    policy = Paced(load)

    async def late(one: int) -> float:
        await asyncio.sleep(apart_s * one)
        first_s = await stream(policy, f"s{one}")
        return 1e3 * (first_s - policy.firsts[f"s{one}"])

    return await asyncio.gather(*map(late, range(number)))


class _GatewayStream:
    """A stream of an episode."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def __call__(self, policy: Paced, session: str) -> float:
        """Play an episode of one turn."""
        taken: list[float] = []

        async def ask(url: str, key: str) -> None:
            taken.append(await self._clients.run(url, key, None))

        await _played(_Asked(ask), policy, policy.renderer, session, 1)
        return taken[0]


class _BareStream:
    """A stream of a server that does nothing else."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    async def __call__(self, policy: Paced, session: str) -> float:
        """Serve one request."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            json.loads(await reader.readexactly(int(length)))
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with policy.watched(session, lambda ids: writer.write(b'data: {"content": "%d"}\n\n' % ids[0])):
                await policy.generate([1], Sampling(64), session=session)
            writer.write(b"data: [DONE]\n\n")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await self._clients.run(f"http://127.0.0.1:{port}/v1", "key", None)


class Clients:
    """The process of the clients."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._numbers = count()
        self._results: dict[int, asyncio.Future[float]] = {}

    async def run(self, url: str, key: str, payload: int | None) -> float:
        """How long a client takes at an endpoint (seconds). payload: see `benchmarks.gateway_client`."""
        number = next(self._numbers)
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._results[number] = result
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(f"{json.dumps([number, url, key, payload])}\n".encode())
        return await result

    async def listen(self) -> None:
        """Pass on what the process says, until it ends."""
        assert self._process.stdout is not None, "it is a pipe"
        async for line in self._process.stdout:
            number, seconds = json.loads(line)
            self._results.pop(number).set_result(seconds)
        for result in self._results.values():
            result.set_exception(EngineError("the process of the clients has ended."))


@asynccontextmanager
async def client_process() -> AsyncIterator[Clients]:
    """The clients during the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.gateway_client", stdin=PIPE, stdout=PIPE
    )
    clients = Clients(process)
    listening = asyncio.create_task(clients.listen())
    try:
        yield clients
    finally:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        await listening
        await process.wait()
