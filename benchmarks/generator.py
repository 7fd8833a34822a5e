"""Overhead of the rollout: turns a CPU-second of thousands of episodes, on an instant engine.

Every part of an episode runs (groups, seeds, environment, tool with its checks, deadlines, prefix, renderer
with a real tokenizer, record, verdict); the engine and the tool's function cost nothing.

    turns      128, 1,024 and 10,000 episodes at once: three calls of a tool and an answer. The baseline is
               the same under the thresholds of Python's own garbage collector
    payloads   answers of 5,000, 23,000 and 1,400,000 characters, against the tokenizer only
    long       conversations of 256 turns; these and the largest payloads are the worst cases
    waiting    256 episodes with a tool of 50 ms, against the same with an instant tool, in wall time
    idle       the memory of an episode that waits for the second turn of the engine
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON
from benchmarks.compare import Duration, Figures, Side, figures_of, timed
from benchmarks.instant import Player
from benchmarks.machine import machine
from benchmarks.sections import as_json

_CALLS = 3
_TURNS = _CALLS + 1


@dataclass(frozen=True, slots=True)
class Generator:
    """The workload. Frozen.

    sizes: concurrent episodes, and repetitions of them. payloads: characters, and concurrent episodes.
    long: calls in a long conversation, and concurrent episodes. waiting, idle: concurrent episodes.
    """

    sizes: tuple[tuple[int, int], ...] = ((128, 16), (1024, 4), (10_000, 1))
    payloads: tuple[tuple[int, int], ...] = ((5_000, 64), (23_000, 64), (1_400_000, 2))
    long: tuple[int, int] = (255, 32)
    wait_s: float = 0.05
    waiting: int = 256
    idle: int = 1024
    repeats: int = 5


def bench_generator(settings: Generator | None = None) -> dict[str, JSON]:
    """Run all sections sequentially.

    Returns:
        summary: medians and ratios. sections: by section and side, the median, its spread and every repeat.
        settings: the workload and the machine.
    """
    settings = settings or Generator()
    turns, payloads = _turns(settings), _payloads(settings)
    long, waiting = _long(settings), _waiting(settings)
    idle = asyncio.run(_idle_bytes(settings.idle))
    rates = [turns[f"{size}"].median for size, _ in settings.sizes]
    bound_s = waiting["instant"].median + _CALLS * settings.wait_s
    sections = {"turns_per_cpu_s": turns, "payloads_cpu_s": payloads, "long": long, "waiting_wall_s": waiting}
    return {
        "summary": {
            "turns_per_s": {side: round(figures.median) for side, figures in turns.items()},
            "slowest_to_fastest": min(rates) / max(rates),
            "idle_bytes": idle,
            "waiting_to_bound": waiting["waiting"].median / bound_s,
            "payloads_to_tokenizer": {
                str(size): payloads[f"{size}"].median / payloads[f"{size}, tokenizer"].median
                for size, _ in settings.payloads
            },
            "long_turns_per_s": round(long["turns_per_cpu_s"].median),
        },
        "sections": {
            name: {side: figures._asdict() for side, figures in sides.items()}
            for name, sides in sections.items()
        },
        "settings": {"generator": as_json(asdict(settings)), "calls": _CALLS, "machine": machine()},
    }


def _turns(settings: Generator) -> dict[str, Figures]:
    player = Player()
    amounts: dict[str, int] = {}
    sides: dict[str, Side] = {}
    for size, times in settings.sizes:
        for name, rare in ((f"{size}", True), (f"{size}, Python's collector", False)):
            amounts[name] = size // player.size * player.size * times * _TURNS
            sides[name] = _waves(player, size, times, rare=rare)
    durations = asyncio.run(timed(sides, repeats=settings.repeats))
    return {side: figures_of([amounts[side] / run.cpu_s for run in runs]) for side, runs in durations.items()}


def _payloads(settings: Generator) -> dict[str, Figures]:
    sides: dict[str, Side] = {}
    for size, episodes in settings.payloads:
        player = Player(payload=size, size=min(8, episodes))
        sides[f"{size}"] = _waves(player, episodes, 1, rare=True)
        sides[f"{size}, tokenizer"] = _encoding(player, episodes * _CALLS)
    return _seconds(asyncio.run(timed(sides, repeats=settings.repeats)), "cpu_s")


def _long(settings: Generator) -> dict[str, Figures]:
    calls, episodes = settings.long
    sides = {"long": _waves(Player(calls=calls), episodes, 1, rare=True)}
    (runs,) = asyncio.run(timed(sides, repeats=settings.repeats)).values()
    return {"turns_per_cpu_s": figures_of([(calls + 1) * episodes / run.cpu_s for run in runs])}


def _waiting(settings: Generator) -> dict[str, Figures]:
    sides = {
        "waiting": _waves(Player(wait_s=settings.wait_s), settings.waiting, 1, rare=True),
        "instant": _waves(Player(), settings.waiting, 1, rare=True),
    }
    return _seconds(asyncio.run(timed(sides, repeats=settings.repeats)), "wall_s")


def _waves(player: Player, size: int, times: int, *, rare: bool) -> Side:
    async def run() -> None:
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
    """The memory of an episode during the second turn of the engine, and the tokens of its prefix."""
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
    tokens = player.engine.num_prompt_tokens / player.engine.num_requests
    return {"an_episode": round(num_bytes / episodes), "tokens_of_a_prompt": round(tokens)}


def _seconds(durations: Mapping[str, Sequence[Duration]], field: str) -> dict[str, Figures]:
    return {side: figures_of([run._asdict()[field] for run in runs]) for side, runs in durations.items()}
