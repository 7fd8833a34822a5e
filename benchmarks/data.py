"""How soon a large file of prompts gives its first batch, and the memory that it takes, in fresh processes.

Ours draws from the file as a run does. The baseline reads the whole file with pyarrow and shuffles the
numbers of its rows. Every measurement is a process of its own; the two take turns.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.types import JSON
from benchmarks.data_reader import BATCH, OURS, WHOLE
from benchmarks.machine import machine

_WORDS = 5_000
_AT_ONCE = 131_072


@dataclass(frozen=True, slots=True)
class Settings:
    """Counts of rows in each file, of prompts drawn in turn, and of prompts drawn anywhere."""

    rows: int = 10_000_000
    drawn: int = 70_000
    anywhere: int = 5
    seed: int = 0


SETTINGS = Settings()
"""Frozen."""

GROUPS: Mapping[str, int | None] = {
    "row groups of 131,072": 131_072,
    "row groups of 1,048,576": 1_048_576,
    "one row group": None,
}
"""Rows of a row group; the second is pyarrow's default, the last one, all rows, is there to hurt."""
LINES = "JSON lines"


def bench_data(
    settings: Settings = SETTINGS, *, repeats: int = 5, on_event: Callable[[str], None] = lambda _: None
) -> dict[str, JSON]:
    """Seconds to the first batch, memory, prompts a second, by file and side.

    Returns:
        summary: one line for each file. rows: every repeat, medians and spreads (max - min, over the median).
        settings: what was run, on what.
    """
    with tempfile.TemporaryDirectory() as folder:
        on_event("writing the files")
        files = _written(Path(folder), settings)
        rows = [_measured(name, path, settings, repeats, on_event) for name, path in files.items()]
    summary: dict[str, JSON] = {str(row["name"]): row["line"] for row in rows}
    listed: list[JSON] = [*rows]
    shape: dict[str, JSON] = {
        **asdict(settings),
        "repeats": repeats,
        "batch": BATCH,
        "pyarrow": pa.__version__,
    }
    return {"summary": summary, "rows": listed, "settings": {**shape, **machine()}}


def _written(folder: Path, settings: Settings) -> dict[str, Path]:
    """The same rows in every file."""
    table = pa.concat_tables(_tables(settings))
    files = {name: folder / f"{k}.parquet" for k, name in enumerate(GROUPS)}
    for name, path in files.items():
        pq.write_table(table, path, row_group_size=GROUPS[name] or settings.rows)
    files[LINES] = folder / "lines.jsonl"
    with files[LINES].open("w", encoding="utf-8") as file:
        for batch in table.to_batches(_AT_ONCE):
            file.writelines(f"{json.dumps(row)}\n" for row in batch.to_pylist())
    return files


def _tables(settings: Settings) -> Iterator[pa.Table]:
    rng = random.Random(settings.seed)
    words = [f"word{rng.randrange(10**6)}" for _ in range(_WORDS)]
    for start in range(0, settings.rows, _AT_ONCE):
        numbers = range(start, min(start + _AT_ONCE, settings.rows))
        drawn = [rng.choices(words, k=8) for _ in numbers]
        questions = [f"{' '.join(few)}: what is {n} + {n}?" for few, n in zip(drawn, numbers, strict=True)]
        yield pa.table({"question": questions, "answer": [str(2 * n) for n in numbers]})


def _measured(
    name: str, path: Path, settings: Settings, repeats: int, on_event: Callable[[str], None]
) -> dict[str, JSON]:
    # Without pyarrow's whole read: nothing of it reads lines.
    sides = (OURS,) if name == LINES else (OURS, WHOLE)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        on_event(f"{name}: repeat {repeat + 1} of {repeats}")
        for side in sorted(sides, reverse=repeat % 2 == 1):
            runs[side].append(_run(side, path, settings, repeat))
    figures: dict[str, JSON] = {side: _figures(found) for side, found in runs.items()}
    medians = {side: {key: _median(found, key) for key in found[0]} for side, found in runs.items()}
    ours, whole = medians[OURS], medians.get(WHOLE)
    line = f"first batch in {ours['first_batch_s']:.2f} s, {ours['memory_mb']:.0f} MB"
    if whole is not None:
        line += f" (whole read {whole['first_batch_s']:.2f} s, {whole['memory_mb']:.0f} MB)"
    return {"name": name, "line": line, "file_mb": path.stat().st_size / 1e6, **figures}


def _run(side: str, path: Path, settings: Settings, repeat: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.data_reader", side, str(path), str(settings.drawn)]
    command += [str(settings.anywhere), str(settings.seed + repeat)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _figures(runs: list[dict[str, float]]) -> dict[str, JSON]:
    return {key: _figure([run[key] for run in runs]) for key in runs[0]}


def _figure(values: list[float]) -> dict[str, JSON]:
    median = statistics.median(values)
    return {"runs": [*values], "median": median, "spread": (max(values) - min(values)) / max(median, 1e-9)}


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)
