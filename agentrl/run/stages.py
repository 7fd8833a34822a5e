"""How long each stage of a run took, on the wall and on the processor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stage(NamedTuple):
    """A stage that has ended. steps: units of work done in it; seconds of wall and CPU time."""

    name: str
    steps: int
    wall_s: float
    cpu_s: float


class Stopwatch:
    """Times stages that follow each other; the same name again adds to what it has."""

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}

    @contextmanager
    def stage(self, name: str, steps: int = 1) -> Iterator[None]:
        """Time what happens inside, also when it is interrupted."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            before = self._stages.get(name, Stage(name, 0, 0.0, 0.0))
            self._stages[name] = Stage(
                name,
                before.steps + steps,
                before.wall_s + time.perf_counter() - wall,
                before.cpu_s + time.process_time() - cpu,
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages so far, in the order in which they began."""
        return tuple(self._stages.values())
