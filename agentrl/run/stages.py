"""What a run takes: wall and CPU time of each stage, with child processes; the lag of its event loop."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from agentrl.runtime.activity import working

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StageTime(NamedTuple):
    """A stage that has ended. steps: units of work in it (count); wall_s, cpu_s: seconds."""

    name: str
    steps: int
    wall_s: float
    cpu_s: float


class Stopwatch:
    """Times stages that follow each other; stages of one name are summed.

    earlier: the stages of the attempts that a run resumes from.
    """

    def __init__(self, earlier: Iterable[StageTime] = ()) -> None:
        self._stages = {stage.name: stage for stage in earlier}

    @contextmanager
    def stage(self, name: str, steps: int = 1, *, what: str = "") -> Iterator[None]:
        """Time the block, also when it is interrupted. what: more of it, for the status and the timeline."""
        wall, cpu = time.perf_counter(), cpu_time()
        try:
            with working(name, what):
                yield
        finally:
            before = self._stages.get(name, StageTime(name, 0, 0.0, 0.0))
            self._stages[name] = StageTime(
                name,
                before.steps + steps,
                before.wall_s + time.perf_counter() - wall,
                before.cpu_s + cpu_time() - cpu,
            )

    @property
    def stages(self) -> tuple[StageTime, ...]:
        """All stages so far, in the order in which they began."""
        return tuple(self._stages.values())


def cpu_time() -> float:
    """CPU time of this process and all its descendants so far (seconds).

    The time of a descendant whose parent has not waited for it is lost when it ends.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    running = sum(_ticks(pid) for pid in list(process_tree())[1:])
    return time.process_time() + ended.ru_utime + ended.ru_stime + running / _TICKS_PER_S


def process_tree(root: int | None = None) -> Iterator[int]:
    """A process, then all its descendants. root: its id; None = this process."""
    first = os.getpid() if root is None else root
    yield first
    yield from _descendants(first)


def tree_cpu_time(root: int) -> float:
    """CPU time of a process and all its descendants so far (seconds, in steps of 10 ms); see `cpu_time`."""
    return sum(map(_ticks, process_tree(root))) / _TICKS_PER_S


def _descendants(pid: int) -> Iterator[int]:
    # A process may end while its files are read.
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


def _ticks(pid: int) -> int:
    with suppress(OSError):
        # After the name, which may hold any characters: state, parent, ... utime and stime are the 12th and
        # 13th, those of waited-for children the 14th and 15th.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


PERIOD_S = 0.01


class LagMeter:
    """Sleeps for 10 ms again and again while its block runs, and records the longest delay of a wake-up.

    During a delay the loop handles no replies and no deadlines.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._task = asyncio.create_task(self._watch(), name="agentrl-lag-meter")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def take(self) -> float:
        """The longest lag since the last call (seconds)."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    async def _watch(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(PERIOD_S)
            self._longest_s = max(self._longest_s, time.perf_counter() - started - PERIOD_S)
