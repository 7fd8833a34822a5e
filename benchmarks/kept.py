"""The price of keeping what groups in flight have played: CPU for each turn, with it and without.

The episodes are those of `generator`: three calls of a tool and an answer, on an instant engine, whose turns
cost nothing beside the code that plays them. The world saves its state after each call, with that of its
random generator. The sides, in alternating repeats:

    without    an asynchronous run that keeps what it plays only where it is stopped
    kept       each turn is a line of a file, which a thread writes; the CPU is that of both threads
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.envs.resuming import StoppableEpisodes
from agentrl.rollout.group import GroupStep
from agentrl.rollout.group_log import GroupLog
from agentrl.runtime.collector import rare_collections
from agentrl.tools import inline
from agentrl.types import JSON
from benchmarks.compare import Duration, Side, figures_of, timed
from benchmarks.instant import Player
from benchmarks.library import Library
from benchmarks.machine import machine

_CALLS = 3
_TURNS = _CALLS + 1
_FILE = "groups.jsonl"


@dataclass(frozen=True, slots=True)
class KeptLoad:
    """The workload. loads: characters of a tool's result, and concurrent episodes (counts). Frozen."""

    loads: tuple[tuple[int, int], ...] = ((40, 256), (4000, 128))
    repeats: int = 7


class _Saving(Library):
    """Saves its state: how many texts it has returned."""

    @inline
    def save_state(self) -> dict[str, JSON]:
        """The number of calls."""
        return {"_num_calls": self._num_calls}


def bench_kept(load: KeptLoad | None = None) -> dict[str, JSON]:
    """Measure both sides, over interleaved repeats.

    Returns:
        summary: by load, medians of the CPU for each turn (microseconds), the difference, and the bytes of
        the file for each turn. rows: every repeat. settings: the workload and the machine.
    """
    load = load or KeptLoad()
    summary: dict[str, JSON] = {}
    rows: dict[str, JSON] = {}
    for payload, episodes in load.loads:
        with TemporaryDirectory(prefix="agentrl-kept-") as folder:
            spent, num_bytes = asyncio.run(_measured(Path(folder), payload, episodes, load.repeats))
        turns = episodes * _TURNS
        figures = {
            side: figures_of([1e6 * run.cpu_s / turns for run in runs]) for side, runs in spent.items()
        }
        medians = {side: each.median for side, each in figures.items()}
        summary[f"{payload}"] = {
            "us_per_turn": {**medians},
            "difference_us": medians["kept"] - medians["without"],
            "bytes_per_turn": num_bytes / turns,
        }
        rows[f"{payload}"] = {side: each._asdict() for side, each in figures.items()}
    settings: dict[str, JSON] = {"repeats": load.repeats, "loads": [list(each) for each in load.loads]}
    return {"summary": summary, "rows": rows, "settings": {**settings, **machine()}}


async def _measured(
    folder: Path, payload: int, episodes: int, repeats: int
) -> tuple[dict[str, list[Duration]], int]:
    player, path = Player(payload=payload), folder / _FILE
    sides: dict[str, Side] = {
        "without": partial(_played, player, episodes, None),
        "kept": partial(_kept, player, episodes, path),
    }
    spent = await timed(sides, repeats=repeats)
    return spent, path.stat().st_size


async def _kept(player: Player, episodes: int, path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        log = GroupLog(thread.submit, _fail)
        log.begin(path, 0)
        await _played(player, episodes, log.add)


async def _played(player: Player, episodes: int, note: Callable[[GroupStep], None] | None) -> None:
    group_player = replace(
        player.group_player,
        make_env=lambda: _Saving(player.texts),
        episodes=StoppableEpisodes(),
        note=note,
    )
    with rare_collections():
        await player.play(episodes, group_player)


def _fail(sentence: str) -> None:
    raise AssertionError(sentence)
