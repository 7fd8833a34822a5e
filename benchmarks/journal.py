"""Cost of the journal in a run: the longest stall of the event loop while a step of episodes is written.

Two writers write the same episodes in alternating repeats: the journal, whose thread serialises, compresses
and writes, and the baseline, an earlier version of the journal: uncompressed lines of JSON, serialised and
written on the event loop. Meanwhile a task of the loop wakes up every 10 ms: its longest delay is the stall.
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

from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.run.stages import LagMeter
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
class JournalLoad:
    """The entries to write. tokens: of an episode, half of them the policy's (count). Frozen."""

    episodes: int = 512
    tokens: int = 8000
    turns: int = 4
    vocab: int = 150_000
    repeats: int = 5


def bench_journal(load: JournalLoad | None = None) -> dict[str, JSON]:
    """Measure the longest stall of both sides, over interleaved repeats.

    Returns:
        summary: longest_stall_ms of the journal and of the baseline; medians of the seconds until all is on
        disk, and of the bytes. rows: every repeat. settings: of the entries and the machine.
    """
    load = load or JournalLoad()
    rows = asyncio.run(_measured(load))
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
        "settings": {**asdict(load), "baseline": BASELINE, **machine()},
    }


async def _measured(load: JournalLoad) -> dict[str, list[_Row]]:
    entries = [_entry(np.random.default_rng(number), load, number) for number in range(load.episodes)]
    sides: dict[str, Callable[[Path, Sequence[Entry]], Awaitable[Path]]] = {
        JOURNAL: _write_journal,
        BASELINE: _write_synchronously,
    }
    rows: dict[str, list[_Row]] = {side: [] for side in sides}
    for repeat in range(-1, load.repeats):
        for side in sorted(sides, reverse=repeat % 2 == 1):
            with TemporaryDirectory(prefix="agentrl-journal-") as folder:
                row = await _row(sides[side], Path(folder), entries)
            # The first repeat of each side is a warm-up.
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
        # So that the meter wakes up before `take`, even if it is late.
        await asyncio.sleep(0.02)
        stall_s = meter.take()
    return {"stall_ms": 1000 * stall_s, "s": seconds, "cpu_s": cpu_s, "bytes": float(path.stat().st_size)}


async def _write_journal(folder: Path, entries: Sequence[Entry]) -> Path:
    async with Journal(folder) as journal:
        return await journal.write_step(1, entries)


async def _write_synchronously(folder: Path, entries: Sequence[Entry]) -> Path:
    """The baseline: serialise and write on the event loop, as the journal did before it had a thread."""
    path = folder / "step_000001.jsonl"
    plain = (_ENTRIES.dump_python(entry, exclude_defaults=True, warnings="none") for entry in entries)
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n" for row in plain)
    path.write_bytes(b"".join(lines))
    return path


def writes_are_equal(load: JournalLoad, folder: Path) -> bool:
    """Whether both sides write the same entries."""
    entries = [_entry(np.random.default_rng(number), load, number) for number in range(load.episodes)]
    lines = asyncio.run(_write_synchronously(folder, entries)).read_text(encoding="utf-8").split("\n")[:-1]
    journalled = list(read_journal(asyncio.run(_write_journal(folder, entries))))
    return [_ENTRIES.dump_python(entry, exclude_defaults=True) for entry in journalled] == [
        _ENTRIES.dump_python(_ENTRIES.validate_json(line), exclude_defaults=True) for line in lines
    ]


def _entry(rng: np.random.Generator, load: JournalLoad, number: int) -> Entry:
    turns = tuple(_turn(rng, load, index) for index in range(load.turns))
    id = f"g{number // 16}-{number % 16}"
    task = Task.ask(f"t{number // 16}", _words(rng, 40, load.vocab), "answer")
    rewards = (None,) * (load.turns - 1) + (1.0,)
    trajectories = (Trajectory(turns),)
    episode = Episode(
        id, "Bench-v0", task, 7, Limits(max_tokens=None), trajectories, rewards, Ending.COMPLETED
    )
    return Entry(episode, (Verdict(id, "env", 1.0, {"env": 1.0}),), Outcome.TRAINED)


def _turn(rng: np.random.Generator, load: JournalLoad, index: int) -> Turn:
    length = load.tokens // load.turns // 2
    completion = Completion(
        _ids(rng, length, load.vocab),
        # Most tokens of a trained policy have a probability near 1.
        (-(rng.exponential(0.3, length) ** 2)).astype(np.float32),
        np.full(length, 12, np.int32),
        Finish.STOP,
        2,
    )
    action, observation = _words(rng, length, load.vocab), _words(rng, length, load.vocab)
    observation_ids = _ids(rng, length, load.vocab)
    return Turn(
        (Message("tool", observation),),
        Message("assistant", action),
        TurnTokens(observation_ids, completion),
        index,
    )


def _ids(rng: np.random.Generator, length: int, vocab: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Tokens with frequencies similar to a natural language (Zipf)."""
    return np.minimum(rng.zipf(1.2, length), vocab - 1).astype(np.int32)


def _words(rng: np.random.Generator, length: int, vocab: int) -> str:
    """Words of the same frequencies; the word of a token is its id times 7,919 in hexadecimal."""
    return " ".join(format(n * 7919, "x") for n in _ids(rng, length, vocab).tolist())
