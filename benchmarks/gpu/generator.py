"""The generator beside a raw client of the same server: sampled tokens a second, and the driver's CPU time.

Episodes have four turns (see `playing`). Our generator plays them in the driver, and in some players.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from agentrl.data.source import Prompt
from agentrl.engine.sglang.clients import Clients
from agentrl.errors import EngineError
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.local import LocalPlayers
from agentrl.rollout.players.players import Players
from agentrl.runtime.activity import Activities
from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON, Ending
from benchmarks.compare import figures_of
from benchmarks.gpu import playing
from benchmarks.gpu.job import Bench
from benchmarks.gpu.raw_client import RawClient
from benchmarks.gpu.server import url_of
from benchmarks.gpu.shapes import shape_of
from benchmarks.library import TASK

_OURS, _RAW, _PLAYERS = "ours", "raw", "players"
_CORES, _MOST_PLAYERS = 4, 8
"""A player for so many cores, and no more than so many players."""
_NEW, _TINY_NEW = 128, 16
_MOST_REPEATS = 5
_UNIT = 20_000
"""Sampled tokens a second that the driver's CPU time is stated for."""


class _Run(NamedTuple):
    """tokens: sampled (count). wall_s, cpu_s: of all episodes, and of this process (seconds)."""

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Sampled tokens a second."""
        return self.tokens / self.wall_s


class Episodes:
    """The sides: our generator in this process or in players, and the raw client with prompts as long.

    players: processes (count).
    """

    def __init__(self, plan: playing.Plan, players: int, folder: Path) -> None:
        self.plan, self._num_players, self._folder = plan, players, folder
        self._lengths: list[int] = []
        self._policy = plan.policy()
        self._player, self._calling = playing.player_of(self._policy, plan.new)
        self._players: Players | None = None
        self._clients = Clients(self._policy)

    @asynccontextmanager
    async def open_players(self) -> AsyncIterator[None]:
        """The processes of players, for the block."""
        started = PlayerPlan(playing.__name__, json.dumps(self.plan).encode(), self._folder / "players")
        launcher = LocalPlayers(self._num_players)
        try:
            async with Players(
                launcher, started, self._policy, Activities(), print, self._clients
            ) as players:
                self._players = players.in_place_of(self._player)
                yield
        finally:
            await self._policy.close()

    async def ours(self, episodes: int, salt: str) -> int:
        """Play this number of episodes at once by groups; the tokens that were sampled.

        Raises:
            EngineError: an episode was not played to its end.
        """
        self._policy.salt = salt
        with rare_collections():
            tokens = await self._play(self._player, episodes)
        prompts = self._calling.prompts
        self._lengths = self._lengths or [round(statistics.fmean(lengths)) for lengths in prompts]
        return tokens

    async def players(self, episodes: int, salt: str) -> int:
        """The same by the players, in the block of `open_players`. Raises as `ours`."""
        assert self._players is not None, "they are open"
        self._policy.salt = salt
        async with self._clients.held():
            # Players get the salt after it.
            pass
        with rare_collections():
            return await self._play(self._players, episodes)

    async def raw(self, episodes: int, salt: str) -> int:
        """The same requests by the raw client; `ours` has run before."""
        call = self._calling.call
        return await RawClient(self.plan.url, self._lengths, self.plan.new, call).play(episodes, salt)

    async def _play(self, player: GroupPlayer | Players, episodes: int) -> int:
        groups = [player.play(Prompt(i, TASK, i), version=0) for i in range(episodes // playing.GROUP)]
        played = [episode for outcome in await asyncio.gather(*groups) for episode in outcome.episodes]
        for episode in played:
            if episode.ending is not Ending.COMPLETED or len(episode.turns) != playing.TURNS:
                raise EngineError(
                    f"an episode ended as {episode.ending.name} after {len(episode.turns)} turns"
                )
        turns = [turn.tokens for episode in played for turn in episode.turns]
        return sum(len(tokens.completion.token_ids) for tokens in turns if tokens is not None)


async def run(bench: Bench) -> None:
    """A row for each number of episodes."""
    tiny = bench.spec.tiny
    shape = shape_of(bench.spec.shape, tiny=tiny)
    num_players = max(2, min(len(os.sched_getaffinity(0)) // _CORES, _MOST_PLAYERS))
    turn = bench.turn()
    plan = playing.Plan(url_of(turn, shape.name), shape.vocab, _TINY_NEW if tiny else _NEW)
    episodes = Episodes(plan, num_players, bench.folder)
    async with episodes.open_players():
        bench.quiet()
        await episodes.ours(playing.GROUP, "first")
        await episodes.players(num_players * playing.GROUP, "players")
        sizes = bench.spec.episodes
        for position, size in enumerate(sizes):
            # The larger sizes take longer, but all are to be repeated.
            share = bench.left_s * math.sqrt(size) / sum(map(math.sqrt, sizes[position:]))
            bench.row(f"{size} episodes", *_row(await _runs(episodes, size, share), size, num_players))


async def _runs(episodes: Episodes, size: int, seconds: float) -> dict[str, list[_Run]]:
    ends = time.monotonic() + seconds
    sides = {_OURS: episodes.ours, _RAW: episodes.raw, _PLAYERS: episodes.players}
    runs: dict[str, list[_Run]] = {side: [] for side in sides}
    longest = 0.0
    # The kernels and graphs of this size are warm, and the connections of the server accepted once.
    await episodes.raw(min(size, 256), f"warm-{size}")
    for repeat in range(_MOST_REPEATS):
        started = time.monotonic()
        if repeat and started + longest > ends:
            break
        first = repeat % len(sides)
        for side in [*sides, *sides][first : first + len(sides)]:
            runs[side].append(await _timed(partial(sides[side], size, f"{side}-{repeat}-{size}")))
        longest = max(longest, time.monotonic() - started)
    return runs


def _row(
    runs: Mapping[str, Sequence[_Run]], size: int, num_players: int
) -> tuple[str, dict[str, JSON], dict[str, float]]:
    """The line, the figures, and what is compared with the best of this card."""
    rates = {side: figures_of([run.rate for run in done]) for side, done in runs.items()}
    raw = rates[_RAW].median
    ratios = {side: rates[side].median / raw for side in (_OURS, _PLAYERS)}
    cores = {side: statistics.median(run.cpu_s / run.wall_s for run in runs[side]) for side in ratios}
    per_unit = {side: cores[side] * _UNIT / rates[side].median for side in ratios}
    line = (
        f"{rates[_OURS].median:,.0f} tokens/s against {raw:,.0f} of a raw client = {ratios[_OURS]:.3f} "
        f"(median of {len(runs[_OURS])}, spread {rates[_OURS].spread:.0%}); {num_players} players "
        f"{rates[_PLAYERS].median:,.0f} = {ratios[_PLAYERS]:.3f} (spread {rates[_PLAYERS].spread:.0%}); the "
        f"driver takes {per_unit[_OURS]:.2f} of a core a {_UNIT:,} tokens/s, {per_unit[_PLAYERS]:.2f} with "
        "players"
    )
    figures: dict[str, JSON] = {
        "episodes": size,
        "turns": playing.TURNS,
        "num_players": num_players,
        "ratio": {**ratios},
        "driver_cores": {**cores},
        **{side: side_figures._asdict() for side, side_figures in rates.items()},
    }
    best = {
        "tokens_per_s": rates[_OURS].median,
        "ratio": ratios[_OURS],
        "driver_cores_less": per_unit[_OURS],
        "players_tokens_per_s": rates[_PLAYERS].median,
        "players_ratio": ratios[_PLAYERS],
    }
    return line, figures, best


async def _timed(play: Callable[[], Awaitable[int]]) -> _Run:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = await play()
    return _Run(tokens, time.perf_counter() - wall, time.process_time() - cpu)
