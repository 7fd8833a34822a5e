"""Seconds to the first batch of a large file of prompts, and memory, in fresh processes.

Ours draws from the file as a run does. The baseline reads the full file with pyarrow and shuffles the numbers
of its rows. Every measurement has its own process; the two sides alternate.
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
from benchmarks.data_reader import BATCH, FULL_READ, OURS
from benchmarks.machine import machine

_WORDS = 5_000
_ROWS_PER_BATCH = 131_072


@dataclass(frozen=True, slots=True)
class Settings:
    """rows: of each file. drawn: prompts in sequence. anywhere: prompts at random numbers (counts)."""

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
"""Rows of a row group; the second is pyarrow's default, the last one (all rows) is the worst case."""
LINES = "JSON lines"


def bench_data(
    settings: Settings = SETTINGS, *, repeats: int = 5, on_event: Callable[[str], None] = lambda _: None
) -> dict[str, JSON]:
    """Measure seconds to the first batch, memory, and prompts a second, by file and side.

    Returns:
        summary: one line for each file. rows: every repeat, medians and spreads (max - min, over the median).
        settings: the workload and the machine.
    """
    with tempfile.TemporaryDirectory() as directory:
        on_event("writing the files")
        files = _write_files(Path(directory), settings)
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


def _write_files(directory: Path, settings: Settings) -> dict[str, Path]:
    """Write the same rows to every file."""
    table = pa.concat_tables(_tables(settings))
    files = {name: directory / f"{k}.parquet" for k, name in enumerate(GROUPS)}
    for name, path in files.items():
        pq.write_table(table, path, row_group_size=GROUPS[name] or settings.rows)
    files[LINES] = directory / "lines.jsonl"
    with files[LINES].open("w", encoding="utf-8") as file:
        for batch in table.to_batches(_ROWS_PER_BATCH):
            file.writelines(f"{json.dumps(row)}\n" for row in batch.to_pylist())
    return files


def _tables(settings: Settings) -> Iterator[pa.Table]:
    rng = random.Random(settings.seed)
    words = [f"word{rng.randrange(10**6)}" for _ in range(_WORDS)]
    for start in range(0, settings.rows, _ROWS_PER_BATCH):
        numbers = range(start, min(start + _ROWS_PER_BATCH, settings.rows))
        prefixes = [rng.choices(words, k=8) for _ in numbers]
        questions = [
            f"{' '.join(prefix)}: what is {n} + {n}?" for prefix, n in zip(prefixes, numbers, strict=True)
        ]
        yield pa.table({"question": questions, "answer": [str(2 * n) for n in numbers]})


def _measured(
    name: str, path: Path, settings: Settings, repeats: int, on_event: Callable[[str], None]
) -> dict[str, JSON]:
    # Without the full read by pyarrow.parquet, which does not read JSON lines.
    sides = (OURS,) if name == LINES else (OURS, FULL_READ)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        on_event(f"{name}: repeat {repeat + 1} of {repeats}")
        for side in sorted(sides, reverse=repeat % 2 == 1):
            runs[side].append(_run(side, path, settings, repeat))
    figures: dict[str, JSON] = {side: _figures(side_runs) for side, side_runs in runs.items()}
    medians = {
        side: {key: _median(side_runs, key) for key in side_runs[0]} for side, side_runs in runs.items()
    }
    ours, full_read = medians[OURS], medians.get(FULL_READ)
    line = f"first batch in {ours['first_batch_s']:.2f} s, {ours['memory_mb']:.0f} MB"
    if full_read is not None:
        line += f" (whole read {full_read['first_batch_s']:.2f} s, {full_read['memory_mb']:.0f} MB)"
    return {"name": name, "line": line, "file_mb": path.stat().st_size / 1e6, **figures}


def _run(side: str, path: Path, settings: Settings, repeat: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.data_reader", side, str(path), str(settings.drawn)]
    command += [str(settings.anywhere), str(settings.seed + repeat)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(process.stdout)
    return figures


def _figures(runs: list[dict[str, float]]) -> dict[str, JSON]:
    return {key: _figure([run[key] for run in runs]) for key in runs[0]}


def _figure(values: list[float]) -> dict[str, JSON]:
    median = statistics.median(values)
    return {"runs": [*values], "median": median, "spread": (max(values) - min(values)) / max(median, 1e-9)}


def _median(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)
