"""The sides of the benchmark, each in a process of its own, and the resources of their processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.sglang.launch.listener import Listener, free_ports
from agentrl.errors import UserError
from agentrl.processes import guard
from agentrl.run.stages import process_tree, tree_cpu_time
from agentrl.types import JSON

ROOT = Path(__file__).resolve().parents[2]
_STARTED_S = 300.0
_ROUND_S = 900.0
_STOPPED_S = 20.0
_SAMPLE_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LINE_BYTES = 1 << 20
_LOG_CHARS = 1000


class Round(NamedTuple):
    """One run of a side, which played `episodes`. cpu_s, peak_bytes: of all its processes."""

    episodes: int
    wall_s: float
    cpu_s: float
    peak_bytes: int


class InstantEndpoint(Listener):
    """The chat endpoint of `endpoint`, in a process of its own."""

    def __init__(self, folder: Path, calls: int) -> None:
        super().__init__("endpoint", free_ports(1)[0], folder)
        self._calls = calls

    async def start(self) -> None:
        """See `Listener.start`."""
        command = [sys.executable, "-m", "benchmarks.peers.endpoint", str(self.port), str(self._calls)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        await self._start_process(command, environment, grace_s=1.0, within_s=_STARTED_S)


@dataclass(frozen=True, slots=True)
class Program:
    """The program of a side. command: settings are its last argument, as JSON. log: of its standard error."""

    name: str
    command: Sequence[str]
    settings: Mapping[str, JSON]
    environment: Mapping[str, str]
    log: Path

    @asynccontextmanager
    async def started(self) -> AsyncIterator[Side]:
        """Run it during the block; all its processes end with the block, or with this process.

        Raises:
            UserError: it ended, or was not ready in time; with the end of its log.
        """
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *guard.command([*self.command, json.dumps(self.settings)]),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=dict(self.environment),
                limit=_LINE_BYTES,
                # Its own process group: Ctrl-C reaches only this process, which then stops it.
                start_new_session=True,
            )
        side = Side(self, process)
        try:
            side.resolved = await side.next_line(_STARTED_S)
            yield side
        finally:
            await side.stop()


class Side:
    """A side whose process runs. resolved: the settings that it reported."""

    def __init__(self, program: Program, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = program.name
        self._log, self._process = program.log, process
        self._requests, self._replies = process.stdin, process.stdout
        self.resolved: dict[str, JSON] = {}

    async def play(self, episodes: int, turns: int) -> Round:
        """Play all episodes once. turns: of the model in an episode.

        Raises:
            UserError: the process ended, or an episode was not played as it should be.
        """
        with _sampled_peak(self._process.pid) as peak:
            cpu_s, began = self.cpu_s, time.perf_counter()
            reply = await self.ask("play")
            wall_s, cpu_s = time.perf_counter() - began, self.cpu_s - cpu_s
        expected = {"episodes": episodes, "solved": episodes, "turns": episodes * turns, "error": None}
        if {"error": None, **reply} != expected:
            raise UserError(f"{self.name} played {reply} in place of {expected}; {self._log_tail()}")
        return Round(episodes, wall_s, cpu_s, peak.num_bytes)

    @property
    def cpu_s(self) -> float:
        """CPU time of all its processes so far (seconds)."""
        return tree_cpu_time(self._process.pid)

    async def ask(self, request: str) -> dict[str, JSON]:
        """Send a line, and wait for what is printed then; see `next_line`."""
        self._requests.write(f"{request}\n".encode())
        return await self.next_line(_ROUND_S)

    async def next_line(self, within_s: float) -> dict[str, JSON]:
        """The next object that the process prints.

        Raises:
            UserError: it ended, or printed none in time.
        """
        line = b""
        with suppress(TimeoutError):
            line = await asyncio.wait_for(self._replies.readline(), within_s)
        if not line:
            raise UserError(f"{self.name} ended, or took longer than {within_s:g} s; {self._log_tail()}")
        values: dict[str, JSON] = json.loads(line)
        return values

    async def stop(self) -> None:
        """End all its processes, and wait for that."""
        self._requests.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOPPED_S)
            return
        self._process.terminate()
        await self._process.wait()

    def _log_tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
        return f"its log ends with: {' '.join(text.split()) or 'nothing'}"


class _Peak:
    num_bytes = 0

    async def sample(self, root: int) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, resident_bytes(root))
            await asyncio.sleep(_SAMPLE_S)


@contextmanager
def _sampled_peak(root: int) -> Iterator[_Peak]:
    peak = _Peak()
    sampling = asyncio.create_task(peak.sample(root))
    try:
        yield peak
    finally:
        sampling.cancel()


def resident_bytes(root: int) -> int:
    """Memory of a process and its descendants: their anonymous pages, and the most file pages of one of them.

    File pages, such as those of libraries, are mostly the same ones in all processes.
    """
    anonymous, files = 0, 0
    for pid in process_tree(root):
        with suppress(OSError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
            anonymous += resident - shared
            files = max(files, shared)
    return (anonymous + files) * _PAGE_BYTES
