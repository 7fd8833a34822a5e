"""One process of the benchmark of data: `python -m benchmarks.data_reader SIDE FILE DRAWN ANYWHERE SEED`."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import pyarrow.parquet as pq

from agentrl.data import Columns, FileSource, PromptStream

OURS, WHOLE = "ours", "whole read"
BATCH = 32
COLUMNS = Columns("question", "answer")


class Reader:
    """Draws prompts in turn, and by their number."""

    def __init__(self, draw: Callable[[], object], draw_at: Callable[[int], object], count: int) -> None:
        self.draw = draw
        self.draw_at = draw_at
        self.count = count


def ours(path: str, seed: int) -> Reader:
    """As a run does it."""
    source = FileSource(path, COLUMNS, seed=seed)
    stream = PromptStream(source)
    return Reader(stream.next, source.prompt, source.num_tasks)


def whole(path: str, seed: int) -> Reader:
    """All of it in memory, and the numbers of its rows in a shuffled array."""
    table = pq.read_table(path, columns=list(COLUMNS.names))
    order = np.random.default_rng(seed).permutation(len(table))
    ordinals = cycle(range(len(table)))

    def row(number: int) -> object:
        return table.slice(int(order[number]), 1).to_pylist()

    return Reader(lambda: row(next(ordinals)), row, len(table))


def measure(side: str, path: str, drawn: int, anywhere: int, seed: int) -> dict[str, float]:
    """Seconds to open and to the first batch, memory above that of the imports (MB), prompts a second."""
    before = _most_memory()
    started = time.perf_counter()
    reader = (ours if side == OURS else whole)(path, seed)
    opened = time.perf_counter()
    for _ in range(BATCH):
        reader.draw()
    first = time.perf_counter()
    at_first = _most_memory() - before
    slowest = 0.0
    for _ in range(drawn):
        began = time.perf_counter()
        reader.draw()
        slowest = max(slowest, time.perf_counter() - began)
    ended = time.perf_counter()
    rng = random.Random(seed)
    for _ in range(anywhere):
        reader.draw_at(rng.randrange(reader.count))
    return {
        "open_s": opened - started,
        "first_batch_s": first - started,
        "memory_at_first_batch_mb": at_first / 1e6,
        "prompts_per_s": drawn / (ended - first),
        "slowest_prompt_s": slowest,
        "anywhere_per_s": anywhere / (time.perf_counter() - ended),
        "memory_mb": (_most_memory() - before) / 1e6,
    }


def _most_memory() -> float:
    """The most memory that the process has had so far (bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main(arguments: Sequence[str]) -> None:
    """Measure once and print it as JSON."""
    side, path, *numbers = arguments
    drawn, anywhere, seed = map(int, numbers)
    print(json.dumps(measure(side, path, drawn, anywhere, seed)))


if __name__ == "__main__":
    main(sys.argv[1:])
