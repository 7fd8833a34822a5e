"""What playing costs beside the model: turns a CPU-second of thousands of episodes, on an instant engine.

All that a run does for an episode is done (groups, seeds, environment, tool with its checks, deadlines,
prefix, renderer with a real tokenizer, record, verdict); the engine and the tool's function cost nothing.

    turns      128, 1,024 and 10,000 episodes at once: three calls of a tool and an answer. The baseline is
               the same under the thresholds of Python's own garbage collector
    payloads   answers of 5,000, 23,000 and 1,400,000 characters, against their tokenizer called bare
    long       conversations of 256 turns. These, and the largest payloads, are there to hurt
    waiting    256 episodes with a tool of 50 ms, against the same with an instant one, on the wall
    idle       the memory of an episode that waits for the engine's second turn
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from agentrl.collector import rare_collections
from agentrl.types import JSON
from benchmarks.compare import Duration, Side, timed
from benchmarks.instant import Player
from benchmarks.machine import machine

_CALLS = 3
_TURNS = _CALLS + 1


@dataclass(frozen=True, slots=True)
class Generator:
    """What is played. Frozen.

    sizes: episodes at once, and how often one after another. payloads: characters, and episodes at once.
    long: calls in a long conversation, and episodes at once. waiting: episodes at once. idle: episodes.
    """

    sizes: tuple[tuple[int, int], ...] = ((128, 16), (1024, 4), (10_000, 1))
    payloads: tuple[tuple[int, int], ...] = ((5_000, 64), (23_000, 64), (1_400_000, 2))
    long: tuple[int, int] = (255, 32)
    wait_s: float = 0.05
    waiting: int = 256
    idle: int = 1024
    repeats: int = 5


class Measured(NamedTuple):
    """A side in figures: the median, the spread (max - min, over the median) and every repeat."""

    median: float
    spread: float
    repeats: list[JSON]


def bench_generator(settings: Generator | None = None) -> dict[str, JSON]:
    """All sections, one after another.

    Returns:
        summary: medians and ratios. sections: by section and side, the median, its spread and every repeat.
        settings: what was played, on what.
    """
    settings = settings or Generator()
    turns, payloads = _turns(settings), _payloads(settings)
    long, waiting = _long(settings), _waiting(settings)
    idle = asyncio.run(_idle_bytes(settings.idle))
    known = [turns[f"{size}"].median for size, _ in settings.sizes]
    bound_s = waiting["instant"].median + _CALLS * settings.wait_s
    sections = {"turns_per_cpu_s": turns, "payloads_cpu_s": payloads, "long": long, "waiting_wall_s": waiting}
    shown: dict[str, JSON] = {
        name: {side: found._asdict() for side, found in of.items()} for name, of in sections.items()
    }
    return {
        "summary": {
            "turns_per_s": {side: round(found.median) for side, found in turns.items()},
            "slowest_to_fastest": min(known) / max(known),
            "idle_bytes": idle,
            "waiting_to_bound": waiting["waiting"].median / bound_s,
            "payloads_to_tokenizer": {
                str(size): payloads[f"{size}"].median / payloads[f"{size}, tokenizer"].median
                for size, _ in settings.payloads
            },
            "long_turns_per_s": round(long["turns_per_cpu_s"].median),
        },
        "sections": shown,
        "settings": {"generator": _listed(settings), "calls": _CALLS, "machine": machine()},
    }


def _turns(settings: Generator) -> dict[str, Measured]:
    player = Player()
    amounts: dict[str, int] = {}
    sides: dict[str, Side] = {}
    for size, times in settings.sizes:
        for name, rare in ((f"{size}", True), (f"{size}, Python's collector", False)):
            amounts[name] = size // player.size * player.size * times * _TURNS
            sides[name] = _waves(player, size, times, rare=rare)
    found = asyncio.run(timed(sides, repeats=settings.repeats))
    return {side: measured([amounts[side] / one.cpu_s for one in spent]) for side, spent in found.items()}


def _payloads(settings: Generator) -> dict[str, Measured]:
    sides: dict[str, Side] = {}
    for size, episodes in settings.payloads:
        player = Player(payload=size, size=min(8, episodes))
        sides[f"{size}"] = _waves(player, episodes, 1, rare=True)
        sides[f"{size}, tokenizer"] = _encoding(player, episodes * _CALLS)
    return _seconds(asyncio.run(timed(sides, repeats=settings.repeats)), "cpu_s")


def _long(settings: Generator) -> dict[str, Measured]:
    calls, episodes = settings.long
    sides = {"long": _waves(Player(calls=calls), episodes, 1, rare=True)}
    (spent,) = asyncio.run(timed(sides, repeats=settings.repeats)).values()
    return {"turns_per_cpu_s": measured([(calls + 1) * episodes / one.cpu_s for one in spent])}


def _waiting(settings: Generator) -> dict[str, Measured]:
    sides = {
        "waiting": _waves(Player(wait_s=settings.wait_s), settings.waiting, 1, rare=True),
        "instant": _waves(Player(), settings.waiting, 1, rare=True),
    }
    return _seconds(asyncio.run(timed(sides, repeats=settings.repeats)), "wall_s")


def _waves(player: Player, size: int, times: int, *, rare: bool) -> Side:
    async def run() -> None:
        # The side before leaves its garbage to nobody.
        gc.collect()
        for _ in range(times):
            if rare:
                with rare_collections():
                    await player.play(size)
            else:
                await player.play(size)

    return run


def _encoding(player: Player, number: int) -> Side:
    async def run() -> None:
        for index in range(number):
            player.encode(player.texts[index % len(player.texts)])

    return run


async def _idle_bytes(episodes: int) -> dict[str, JSON]:
    """What an episode holds while the engine works on its second turn, and the tokens of its prefix."""
    player = Player()
    await player.play(player.size)
    player.engine.parked = asyncio.Event()
    gc.collect()
    tracemalloc.start()
    playing = asyncio.create_task(player.play(episodes))
    for _ in range(20):
        await asyncio.sleep(0)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    player.engine.parked.set()
    await playing
    tokens = player.engine.num_seen / player.engine.num_asked
    return {"an_episode": round(num_bytes / episodes), "tokens_of_a_prompt": round(tokens)}


def _seconds(found: Mapping[str, Sequence[Duration]], which: str) -> dict[str, Measured]:
    return {side: measured([one._asdict()[which] for one in spent]) for side, spent in found.items()}


def measured(values: Sequence[float]) -> Measured:
    """The figures of a side."""
    median = statistics.median(values)
    return Measured(median, (max(values) - min(values)) / median, [*values])


def _listed(settings: Generator) -> dict[str, JSON]:
    found: dict[str, JSON] = json.loads(json.dumps(asdict(settings)))
    return found
