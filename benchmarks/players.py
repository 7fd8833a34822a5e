"""What players gain: turns a second of environments that compute, in one process or several.

inside     an instant engine in each player, so that nothing is shared: one player against two
driver     the engine of the driver, as in a run: the driver itself against two players, over pipes
instant    the same where environments compute nothing, which is the worst case: every turn crosses a pipe
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from agentrl.activity import Activities
from agentrl.collector import rare_collections
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.local import LocalPlayers
from agentrl.rollout.players.players import Players
from agentrl.types import JSON
from benchmarks import playing_process
from benchmarks.compare import Figures, figures_of, timed
from benchmarks.instant import Player
from benchmarks.machine import machine
from benchmarks.playing_process import PlayingPlan


@dataclass(frozen=True, slots=True)
class PlayersBench:
    """The workload. Frozen.

    episodes: of a run of a side where environments compute, all at once; of 8 siblings each (count).
    free_episodes: the same, where they do not. calls: of a tool, in each (count). work: squares that a call
    adds up where it computes: about 2 ms. players: of the larger side (count).
    """

    episodes: int = 256
    free_episodes: int = 1024
    calls: int = 3
    work: int = 40_000
    players: int = 2
    repeats: int = 5


class Side(NamedTuple):
    """players: 0 = the driver plays. own_engine: whether each player has an engine."""

    players: int
    own_engine: bool
    work: int
    episodes: int


def sides_of(bench: PlayersBench) -> Mapping[str, Mapping[str, Side]]:
    """The sides by section and name."""
    free = bench.free_episodes
    return {
        "inside": {
            f"players {number}": Side(number, True, bench.work, bench.episodes)
            for number in (1, bench.players)
        },
        "driver": {
            f"players {number}": Side(number, False, bench.work, bench.episodes)
            for number in (0, bench.players)
        },
        "instant": {f"players {number}": Side(number, False, 0, free) for number in (0, bench.players)},
    }


def bench_players(bench: PlayersBench | None = None) -> dict[str, JSON]:
    """All sections, one after the other.

    Returns:
        summary: the ratio of each section, the larger side to the smaller. turns_per_s: by section and side,
        the median, its spread and every repeat. settings: the workload and the machine.
    """
    bench = bench or PlayersBench()
    with rare_collections():
        measured = {name: asyncio.run(_section(sides, bench)) for name, sides in sides_of(bench).items()}
    ratios = {
        name: figures[f"players {bench.players}"].median / min(figures.items())[1].median
        for name, figures in measured.items()
    }
    return {
        "summary": {**ratios, "load_average": os.getloadavg()[0]},
        "turns_per_s": {
            name: {side: figures._asdict() for side, figures in section.items()}
            for name, section in measured.items()
        },
        "settings": {**asdict(bench), "machine": machine()},
    }


async def _section(sides: Mapping[str, Side], bench: PlayersBench) -> dict[str, Figures]:
    async with AsyncExitStack() as started:
        folder = Path(started.enter_context(TemporaryDirectory(prefix="agentrl-bench-")))
        runs = {}
        for name, side in sides.items():
            local = Player(work=side.work, calls=bench.calls)
            players = await started.enter_async_context(_players(side, bench, local, folder / name))
            runs[name] = partial(_play, local, side.episodes, players if side.players else None)
        spent = await timed(runs, repeats=bench.repeats)
    turns = bench.calls + 1
    return {
        name: figures_of([sides[name].episodes * turns / run.wall_s for run in spent[name]]) for name in sides
    }


def _players(side: Side, bench: PlayersBench, local: Player, folder: Path) -> Players:
    """The processes of a side, none where the driver plays."""
    plan = PlayingPlan(side.work, bench.calls, side.own_engine)
    started = PlayerPlan(playing_process.__name__, pickle.dumps(tuple(plan)), folder)
    players = Players(LocalPlayers(side.players), started, local.engine, Activities(), print)
    return players.in_place_of(local.group_player)


async def _play(local: Player, episodes: int, players: Players | None) -> None:
    await local.play(episodes, players)
