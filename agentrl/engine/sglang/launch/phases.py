"""What a server does while it starts, read from its log: importing takes the time before the first mark."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from agentrl.engine.sglang.launch.launcher import Handle

IMPORTING: Final = "importing"
_MARKS: Final = {
    re.compile(rb"Init torch distributed begin"): "joining the other GPUs",
    re.compile(rb"Load weight begin"): "loading weights",
    re.compile(rb"Load weight end"): "allocating the cache",
    re.compile(rb"(?i)capture .*graph begin"): "capturing CUDA graphs",
    re.compile(rb"Compiling|JIT compil"): "compiling",
    re.compile(rb"Tree cache initialized|Application startup complete|Uvicorn running"): "warming up",
}
_POLL_S = 0.2


class StartLog:
    """A log, from a byte on; start: None = what is written from now on."""

    def __init__(self, path: Path, start: int | None = None) -> None:
        self._path = path
        self._read = _size(path) if start is None else start
        self._rest = b""

    def new_phases(self) -> list[str]:
        """The phases that have begun since the last call, in order; none twice in a row."""
        phases: list[str] = []
        for line in self._new_lines():
            phase = next((phase for mark, phase in _MARKS.items() if mark.search(line)), None)
            if phase is not None and phases[-1:] != [phase]:
                phases.append(phase)
        return phases

    def _new_lines(self) -> list[bytes]:
        """What was written since the last call. The last line may still grow: it is left for later."""
        # A log of another machine is emptied when its actor starts.
        self._read = min(self._read, _size(self._path))
        with suppress(OSError), self._path.open("rb") as log:
            log.seek(self._read)
            text = log.read()
            self._read += len(text)
            *lines, self._rest = (self._rest + text).split(b"\n")
            return lines
        return []


async def started(process: Handle, entered: Callable[[str], None]) -> Mapping[str, float]:
    """Start a server and wait until it answers; `entered` is called with each phase as it begins.

    Returns:
        how long each phase took, in order (seconds).

    Raises:
        ConfigError: as for `Handle.start`.
        EngineUnavailableError: as for `Handle.start`.
    """
    course = _Course(entered)
    watching = asyncio.create_task(_watched(StartLog(process.log), course))
    try:
        await process.start()
    finally:
        watching.cancel()
    return course.durations()


class _Course:
    """The phases so far, each with its begin (seconds)."""

    def __init__(self, entered: Callable[[str], None]) -> None:
        self._entered = entered
        self._phases: list[tuple[str, float]] = []
        self.enter(IMPORTING)

    def enter(self, phase: str) -> None:
        if not self._phases or self._phases[-1][0] != phase:
            self._phases.append((phase, time.monotonic()))
            self._entered(phase)

    def durations(self) -> dict[str, float]:
        ends = [*(began_s for _, began_s in self._phases[1:]), time.monotonic()]
        took: dict[str, float] = {}
        for (phase, began_s), end_s in zip(self._phases, ends, strict=True):
            took[phase] = took.get(phase, 0.0) + end_s - began_s
        return took


async def _watched(log: StartLog, course: _Course) -> None:
    while True:
        for phase in log.new_phases():
            course.enter(phase)
        await asyncio.sleep(_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
