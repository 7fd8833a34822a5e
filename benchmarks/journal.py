"""What the journal costs a run: the longest stall of the event loop while a step of episodes is written.

Two writers get the same episodes, repeat by repeat in turns: the journal, whose thread serialises, compresses
and writes, and the baseline, which is what the journal was before: lines of JSON, made and written by the
event loop, uncompressed. Meanwhile a task of the loop wakes up every 10 ms: how late it woke at worst is the
stall.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pydantic import TypeAdapter

from agentrl.observe import Entry, Journal, Outcome, read_journal
from agentrl.run.lag import LagMeter
from agentrl.types import (
    JSON,
    Completion,
    Ending,
    Episode,
    Finish,
    Limits,
    Message,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)
from benchmarks.machine import machine

JOURNAL, BASELINE = "journal", "synchronous, uncompressed"
_ENTRIES = TypeAdapter(Entry)
_Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """What is written. tokens: of an episode, half of them the policy's (count). Frozen."""

    episodes: int = 512
    tokens: int = 8000
    turns: int = 4
    vocab: int = 150_000
    repeats: int = 5


def bench_journal(step: Step | None = None) -> dict[str, JSON]:
    """The longest stall of both sides, over interleaved repeats.

    Returns:
        summary: longest_stall_ms of the journal and of the baseline; medians of the seconds until all is on
        disk, and of the bytes. rows: every repeat. settings: of the entries and the machine.
    """
    step = step or Step()
    rows = asyncio.run(_measured(step))
    medians = {
        side: {name: statistics.median(row[name] for row in side_rows) for name in side_rows[0]}
        for side, side_rows in rows.items()
    }
    longest = {side: max(row["stall_ms"] for row in side_rows) for side, side_rows in rows.items()}
    return {
        "summary": {
            "longest_stall_ms": longest[JOURNAL],
            "longest_stall_ms_baseline": longest[BASELINE],
            "medians": {side: {**values} for side, values in medians.items()},
            "compressed_to": medians[JOURNAL]["bytes"] / medians[BASELINE]["bytes"],
        },
        "rows": {side: [{**row} for row in side_rows] for side, side_rows in rows.items()},
        "settings": {**asdict(step), "baseline": BASELINE, **machine()},
    }


async def _measured(step: Step) -> dict[str, list[_Row]]:
    entries = [_entry(np.random.default_rng(number), step, number) for number in range(step.episodes)]
    sides: dict[str, Callable[[Path, Sequence[Entry]], Awaitable[Path]]] = {
        JOURNAL: _journalled,
        BASELINE: _as_before,
    }
    rows: dict[str, list[_Row]] = {side: [] for side in sides}
    for repeat in range(-1, step.repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            with TemporaryDirectory(prefix="agentrl-journal-") as folder:
                row = await _row(sides[side], Path(folder), entries)
            # The first of each side warms up.
            if repeat >= 0:
                rows[side].append(row)
    return rows


async def _row(
    write: Callable[[Path, Sequence[Entry]], Awaitable[Path]], folder: Path, entries: Sequence[Entry]
) -> _Row:
    async with LagMeter() as meter:
        await asyncio.sleep(0.05)
        meter.take()
        began, cpu = time.perf_counter(), time.process_time()
        path = await write(folder, entries)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        # The meter wakes up first, even if it is late.
        await asyncio.sleep(0.02)
        stall_s = meter.take()
    return {"stall_ms": 1000 * stall_s, "s": seconds, "cpu_s": cpu_s, "bytes": float(path.stat().st_size)}


async def _journalled(folder: Path, entries: Sequence[Entry]) -> Path:
    async with Journal(folder) as journal:
        return await journal.write_step(1, entries)


async def _as_before(folder: Path, entries: Sequence[Entry]) -> Path:
    """The journal as it was before it had a thread."""
    path = folder / "step_000001.jsonl"
    plain = (_ENTRIES.dump_python(entry, exclude_defaults=True, warnings="none") for entry in entries)
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in plain)
    path.write_bytes(b"".join(lines))
    return path


def written_alike(step: Step, folder: Path) -> bool:
    """Whether both sides write the same entries."""
    entries = [_entry(np.random.default_rng(number), step, number) for number in range(step.episodes)]
    lines = asyncio.run(_as_before(folder, entries)).read_text(encoding="utf-8").split("\n")[:-1]
    journalled = list(read_journal(asyncio.run(_journalled(folder, entries))))
    return [_ENTRIES.dump_python(entry, exclude_defaults=True) for entry in journalled] == [
        _ENTRIES.dump_python(_ENTRIES.validate_json(line), exclude_defaults=True) for line in lines
    ]


def _entry(rng: np.random.Generator, step: Step, number: int) -> Entry:
    turns = tuple(_turn(rng, step, place) for place in range(step.turns))
    id = f"g{number // 16}-{number % 16}"
    task = Task.ask(f"t{number // 16}", _words(rng, 40, step.vocab), "answer")
    rewards = (None,) * (step.turns - 1) + (1.0,)
    trajectories = (Trajectory(turns),)
    episode = Episode(
        id, "Bench-v0", task, 7, Limits(max_tokens=None), trajectories, rewards, Ending.COMPLETED
    )
    return Entry(episode, (Verdict(id, "env", 1.0, {"env": 1.0}),), Outcome.TRAINED)


def _turn(rng: np.random.Generator, step: Step, place: int) -> Turn:
    length = step.tokens // step.turns // 2
    completion = Completion(
        _ids(rng, length, step.vocab),
        # Most tokens of a trained policy are nearly sure.
        (-(rng.exponential(0.3, length) ** 2)).astype(np.float32),
        np.full(length, 12, np.int32),
        Finish.STOP,
        2,
    )
    action, observation = _words(rng, length, step.vocab), _words(rng, length, step.vocab)
    world = _ids(rng, length, step.vocab)
    return Turn(
        (Message("tool", observation),), Message("assistant", action), TurnTokens(world, completion), place
    )


def _ids(rng: np.random.Generator, length: int, vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Tokens about as common as those of a language."""
    return np.minimum(rng.zipf(1.2, length), vocab - 1).astype(np.int32)


def _words(rng: np.random.Generator, length: int, vocab: int) -> str:
    """Words of the same commonness; each always the same four letters or so."""
    return " ".join(format(n * 7919, "x") for n in _ids(rng, length, vocab).tolist())
