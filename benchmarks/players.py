"""What players gain: turns a second of environments that compute, in one process or several.

inside     an instant engine in each player, so that nothing is shared: one player against two
driver     the engine of the driver, as in a run: the driver itself against two players, over pipes
instant    the same where environments compute nothing, which is the worst case: every turn crosses a pipe
servers    two players and a server that answers at once: they send requests through the driver, or themselves
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.clients import Clients
from agentrl.rollout.players.launcher import PlayerPlan
from agentrl.rollout.players.local import LocalPlayers
from agentrl.rollout.players.players import Players
from agentrl.runtime.activity import Activities
from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON
from agentrl.types.seams import Policy
from benchmarks import instant_server, playing_process
from benchmarks.compare import Figures, figures_of, timed
from benchmarks.instant import Player
from benchmarks.machine import machine
from benchmarks.playing_process import PlayingPlan

THROUGH_DRIVER, THEMSELVES = "through the driver", "by themselves"


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
    """players: 0 = the driver plays. own_engine: whether each player has an engine. sends_itself: whether the
    players send requests to a server; None = there is no server."""

    players: int
    own_engine: bool
    work: int
    episodes: int
    sends_itself: bool | None = None


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
        "servers": {
            THROUGH_DRIVER: Side(bench.players, False, 0, free, sends_itself=False),
            THEMSELVES: Side(bench.players, False, 0, free, sends_itself=True),
        },
    }


def bench_players(bench: PlayersBench | None = None) -> dict[str, JSON]:
    """All sections, one after the other.

    Returns:
        summary: the ratio of each section, the last side to the first. turns_per_s: by section and side, the
        median, its spread and every repeat; driver_ms: CPU of the driver for each turn, likewise. settings:
        the workload and the machine.
    """
    bench = bench or PlayersBench()
    with rare_collections():
        measured = {name: asyncio.run(_section(sides, bench)) for name, sides in sides_of(bench).items()}
    speeds = {name: [side.turns_per_s.median for side in sides.values()] for name, sides in measured.items()}
    return {
        "summary": {
            **{name: last / first for name, (first, last) in speeds.items()},
            "load_average": os.getloadavg()[0],
        },
        **{
            figure: {
                name: {side: getattr(speed, figure)._asdict() for side, speed in section.items()}
                for name, section in measured.items()
            }
            for figure in Speed._fields
        },
        "settings": {**asdict(bench), "machine": machine()},
    }


class Speed(NamedTuple):
    """Turns a second, and CPU of the driver for each (ms)."""

    turns_per_s: Figures
    driver_ms: Figures


async def _section(sides: Mapping[str, Side], bench: PlayersBench) -> dict[str, Speed]:
    async with AsyncExitStack() as started:
        folder = Path(started.enter_context(TemporaryDirectory(prefix="agentrl-bench-")))
        runs = {}
        for name, side in sides.items():
            local = Player(work=side.work, calls=bench.calls)
            at_server = None
            if side.sends_itself is not None:
                at_server = await started.enter_async_context(_policy_of_server(bench.calls, side.episodes))
            players = await started.enter_async_context(
                _players(side, bench, local, folder / name.replace(" ", "-"), at_server)
            )
            runs[name] = partial(_play, local, side.episodes, players if side.players else None)
        spent = await timed(runs, repeats=bench.repeats)
    speeds = {}
    for name, side in sides.items():
        turns = side.episodes * (bench.calls + 1)
        speeds[name] = Speed(
            figures_of([turns / run.wall_s for run in spent[name]]),
            figures_of([run.cpu_s / turns * 1e3 for run in spent[name]]),
        )
    return speeds


@asynccontextmanager
async def _policy_of_server(calls: int, episodes: int) -> AsyncIterator[SGLangPolicy]:
    """The driver's policy over a server in a process of its own."""
    command = [sys.executable, "-m", instant_server.__name__, str(calls)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    policy = SGLangPolicy((await process.stdout.readline()).decode().strip(), max_concurrency=episodes)
    try:
        yield policy
    finally:
        await policy.close()
        process.stdin.close()
        await process.wait()


def _players(
    side: Side, bench: PlayersBench, local: Player, folder: Path, at_server: SGLangPolicy | None
) -> Players:
    """The processes of a side, none where the driver plays."""
    policy: Policy = at_server or local.engine
    clients = None if at_server is None or not side.sends_itself else Clients(at_server)
    url = "" if at_server is None or clients is None else at_server.url
    plan = PlayingPlan(side.work, bench.calls, side.own_engine, url, side.episodes)
    started = PlayerPlan(playing_process.__name__, pickle.dumps(tuple(plan)), folder)
    players = Players(LocalPlayers(side.players), started, policy, Activities(), print, clients)
    return players.in_place_of(local.group_player)


async def _play(local: Player, episodes: int, players: Players | None) -> None:
    await local.play(episodes, players)
