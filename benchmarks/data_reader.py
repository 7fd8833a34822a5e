"""A process of the benchmark of data: `python -m benchmarks.data_reader SIDE FILE DRAWN ANYWHERE SEED`."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from agentrl.data import Columns, FileSource, PromptStream

OURS, FULL_READ = "ours", "whole read"
BATCH = 32
COLUMNS = Columns("question", "answer")


class PromptSampler:
    """Draws prompts in sequence (`draw`) and by number (`draw_at`). count: prompts of an epoch."""

    def __init__(self, draw: Callable[[], object], draw_at: Callable[[int], object], count: int) -> None:
        self.draw = draw
        self.draw_at = draw_at
        self.count = count


def ours(path: str, seed: int) -> PromptSampler:
    """The sampler of a run: `FileSource` and `PromptStream`."""
    source = FileSource(path, COLUMNS, seed=seed)
    stream = PromptStream(source)
    return PromptSampler(stream.next, source.prompt, source.num_tasks)


def full_read(path: str, seed: int) -> PromptSampler:
    """The baseline: all rows in memory, and their numbers in a shuffled array."""
    table = pq.read_table(path, columns=list(COLUMNS.names))
    order = np.random.default_rng(seed).permutation(len(table))
    ordinals = cycle(range(len(table)))

    def row(number: int) -> object:
        return table.slice(int(order[number]), 1).to_pylist()

    return PromptSampler(lambda: row(next(ordinals)), row, len(table))


def measure(side: str, path: str, drawn: int, anywhere: int, seed: int) -> dict[str, float]:
    """Seconds to open and to the first batch, memory above that of the imports (MB), prompts a second."""
    before = _peak_memory()
    started = time.perf_counter()
    sampler = (ours if side == OURS else full_read)(path, seed)
    opened = time.perf_counter()
    for _ in range(BATCH):
        sampler.draw()
    first = time.perf_counter()
    at_first = _peak_memory() - before
    slowest = 0.0
    for _ in range(drawn):
        began = time.perf_counter()
        sampler.draw()
        slowest = max(slowest, time.perf_counter() - began)
    ended = time.perf_counter()
    rng = random.Random(seed)
    for _ in range(anywhere):
        sampler.draw_at(rng.randrange(sampler.count))
    return {
        "open_s": opened - started,
        "first_batch_s": first - started,
        "memory_at_first_batch_mb": at_first / 1e6,
        "prompts_per_s": drawn / (ended - first),
        "slowest_prompt_s": slowest,
        "anywhere_per_s": anywhere / (time.perf_counter() - ended),
        "memory_mb": (_peak_memory() - before) / 1e6,
    }


def _peak_memory() -> float:
    """The peak memory of the process so far (bytes); `ru_maxrss` begins with that of its parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024.0


def main(arguments: Sequence[str]) -> None:
    """Measure once and print the figures as JSON."""
    side, path, *numbers = arguments
    drawn, anywhere, seed = map(int, numbers)
    print(json.dumps(measure(side, path, drawn, anywhere, seed)))


if __name__ == "__main__":
    main(sys.argv[1:])
