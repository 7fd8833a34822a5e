"""Latency of a synchronous tool during rollouts: SQLite in threads, and on the event loop.

As many episodes as the quickstart has in flight make three calls each, and answer. The embedded engine
decodes random weights of the quickstart's shape: a turn takes as long as its tokens take to be sampled, and
is then replaced by a scripted one that calls the tool. The engine decodes in a process of its own, as in
training, and on the event loop, as in evaluations. The baseline is a tool that is marked as quick (`inline`):
it runs on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.messages import Open
from agentrl.engine.embedded.process import EngineProcess, ProcessEngine
from agentrl.envs import Env
from agentrl.runtime.collector import rare_collections
from agentrl.tools import tool
from agentrl.types import JSON, Completion, ToolStats
from agentrl.types.seams import Policy, Sampling
from agentrl.types.statistics import LATENCY_BINS_MS
from agentrl.weights.hf.export import save_model
from benchmarks.compare import figures_of, interleaved, quantile
from benchmarks.engine import tiny_model
from benchmarks.instant import InstantEngine, Player, texts_of
from benchmarks.library import Library
from benchmarks.machine import machine

HOSTED, ON_LOOP = "engine in a process of its own", "engine on the event loop"
THREAD, INLINE = "thread", "inline"
_QUERY = "SELECT text FROM passages WHERE text LIKE ? ORDER BY length(text), text LIMIT 1"
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class ToolLoad:
    """The episodes. Frozen; groups, siblings and slots (counts) are those of the quickstart.

    turn: bounds of the tokens of a turn. rows: of the database.
    """

    groups: int = 32
    siblings: int = 16
    slots: int = 512
    turn: tuple[int, int] = (8, 24)
    rows: int = 1000
    repeats: int = 5


class Played(NamedTuple):
    """One repeat. call_ms: mean latency. p95_ms: upper end of the quantile's bin. wall_s: of all episodes."""

    call_ms: float
    p95_ms: float
    wall_s: float


@dataclass(slots=True)
class PacedEngine(InstantEngine):
    """A turn takes as long as `policy` takes to sample as many tokens, drawn between the bounds of `turn`."""

    policy: Policy | None = None
    turn: tuple[int, int] = (1, 1)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """The scripted turn."""
        assert self.policy is not None
        number = self.num_turns.get(session, 0)
        size = random.Random(f"{session} {number}").randint(*self.turn)
        await self.policy.generate(prompt_ids, Sampling(size, seed=number), session=session)
        return await InstantEngine.generate(self, prompt_ids, sampling, session=session)

    async def close_session(self, session: str) -> None:
        """Close it in `policy`, too."""
        assert self.policy is not None
        await self.policy.close_session(session)
        await InstantEngine.close_session(self, session)


class QuickPassages(Library):
    """One tool: the shortest passage that contains a word, from SQLite, on the event loop."""

    def __init__(self, database: Path) -> None:
        self._database = database
        super().__init__([""])

    @tool(name="look", inline=True)
    def look(self, where: str) -> str:
        """Look somewhere."""
        return passage(self._database, where)


class ThreadedPassages(QuickPassages):
    """The same, in a thread, as every synchronous tool that is not marked."""

    @tool(name="look")
    def look(self, where: str) -> str:
        """Look somewhere."""
        return passage(self._database, where)


def passage(database: Path, word: str) -> str:
    """The shortest passage that contains a word."""
    with closing(sqlite3.connect(database)) as connection:
        return str(connection.execute(_QUERY, (f"%{word.strip()}%",)).fetchone()[0])


class PassagePlayer(Player):
    """Plays groups whose tool looks into the database. kind: thread or inline."""

    def __init__(self, load: ToolLoad, database: Path, kind: str) -> None:
        super().__init__(size=load.siblings)
        self._passages = partial(ThreadedPassages if kind == THREAD else QuickPassages, database)
        self._load = load

    def use(self, policy: Policy) -> None:
        """Play on this engine from now on."""
        engine = self.engine
        self.engine = PacedEngine(
            engine.call, engine.answer, engine.calls, policy=policy, turn=self._load.turn
        )

    def _env(self, wait_s: float) -> Env:
        del wait_s
        return self._passages()


def bench_tools(load: ToolLoad | None = None) -> dict[str, JSON]:
    """The latency of a call in threads and inline, under both engines; the repeats of all take turns.

    Returns:
        summary: a line for each engine. sections: for each engine and tool the latency of a call, as
        `ToolStats` has it (mean, and the bin of the 95% quantile), and the wall time of all episodes, each
        with medians, spreads and repeats. alone_ms: a call without episodes. settings: of runs and machine.
    """
    load, before = load or ToolLoad(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="agentrl-tools-") as folder, rare_collections():
            return asyncio.run(_bench(load, Path(folder)))
    finally:
        torch.set_num_threads(before)


async def _bench(load: ToolLoad, folder: Path) -> dict[str, JSON]:
    database = _written(load, folder)
    players = {kind: PassagePlayer(load, database, kind) for kind in (THREAD, INLINE)}
    alone_ms = _alone_ms(database)
    async with _engines(load, players[THREAD], folder) as engines:
        sides = {
            f"{engine}, {kind}": partial(_play, players[kind], engines[engine], load)
            for engine, kind in product(engines, players)
        }
        runs = await interleaved(sides, repeats=load.repeats)
    sections: dict[str, JSON] = {}
    for side, played in runs.items():
        columns = zip(Played._fields, zip(*played, strict=True), strict=True)
        sections[side] = {name: figures_of(values)._asdict() for name, values in columns}
    lines: dict[str, JSON] = {}
    for engine in (HOSTED, ON_LOOP):
        means = {kind: figures_of([run.call_ms for run in runs[f"{engine}, {kind}"]]) for kind in players}
        parts = [f"{kind} {of.median:.2f} ms (spread {of.spread:.0%})" for kind, of in means.items()]
        lines[engine] = f"{', '.join(parts)}; alone {alone_ms:.2f} ms"
    return {
        "summary": lines,
        "sections": sections,
        "alone_ms": alone_ms,
        "settings": {**asdict(load), "turn": list(load.turn), "threads": 1, "machine": machine()},
    }


async def _play(player: PassagePlayer, policy: Policy, load: ToolLoad) -> Played:
    player.use(policy)
    began = time.perf_counter()
    outcomes = await player.play(load.groups * load.siblings)
    wall_s = time.perf_counter() - began
    episodes = [episode for outcome in outcomes for episode in outcome.episodes]
    stats = sum((episode.tools["look"] for episode in episodes), ToolStats())
    return Played(1e3 * stats.seconds / stats.calls, p95_ms(stats), wall_s)


def p95_ms(stats: ToolStats) -> float:
    """The upper end of the bin that holds the 95% quantile of the calls' latencies (milliseconds)."""
    ends = [end for end in LATENCY_BINS_MS for _ in range(stats.took.get(f"{end}ms", 0))]
    slower = [math.inf] * (stats.calls - len(ends))
    return quantile([*ends, *slower], 0.95)


@asynccontextmanager
async def _engines(load: ToolLoad, player: Player, folder: Path) -> AsyncIterator[dict[str, Policy]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_model(len(player.tokenizer)).eval()
    save_model(model, player.tokenizer, str(folder / "model"))
    process = EngineProcess(folder / "engine")
    try:
        request = Open(str(folder / "model"), load.slots, _CONTEXT, False, 1, None)
        hosted = await ProcessEngine.opened(process, request)
        on_loop = EmbeddedEngine.from_model(
            model, max_slots=load.slots, max_context_len=_CONTEXT, eos_token_ids=()
        )
        yield {HOSTED: hosted, ON_LOOP: on_loop}
        await on_loop.close()
    finally:
        process.end()


def _written(load: ToolLoad, folder: Path) -> Path:
    database = folder / "passages.sqlite"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE passages (text TEXT)")
        connection.executemany(
            "INSERT INTO passages VALUES (?)", [(text,) for text in texts_of(160)[: load.rows]]
        )
    return database


def _alone_ms(database: Path) -> float:
    passage(database, "tower")
    began = time.perf_counter()
    for _ in range(200):
        passage(database, "tower")
    return 1e3 * (time.perf_counter() - began) / 200
