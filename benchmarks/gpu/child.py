"""The command's side of a job: its process, its messages, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from agentrl.types import JSON
from benchmarks.gpu.job import Spec, Turn, argument_of

_END_S = 20.0
_KILLED_S = 5.0
_LINE_BYTES = 1 << 26
_MAX_ERROR_CHARS = 600


@dataclass(eq=False, slots=True)
class Child:
    """A job's process. on_row, on_note: called with what it reports. quiet: waits until nothing starts.

    facts: what it told. error: why it ended without its figures; "" = it did not.
    """

    spec: Spec
    on_row: Callable[[Spec, dict[str, JSON]], None]
    on_note: Callable[[Spec, str], None]
    quiet: Callable[[], Awaitable[object]]
    facts: dict[str, JSON] = field(default_factory=dict)
    error: str = ""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    _process: Process | None = None
    _reading: asyncio.Task[None] | None = None
    _turn: asyncio.Future[Turn] | None = None

    @property
    def log(self) -> Path:
        """The file with its output."""
        return Path(self.spec.folder) / "logs" / f"{self.spec.name.replace(' ', '-').replace('/', '-')}.log"

    @property
    def is_started(self) -> bool:
        """Whether it was started."""
        return self._process is not None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def finished(self) -> None:
        """Wait for its end."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def start(self) -> None:
        """Start the process: it imports what it needs, and waits for its turn."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # The search path is inherited as it is: with this process's packages in it, SGLang would import them.
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if self.spec.device == "cpu" or self.spec.kind == "warm":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        self._turn = asyncio.get_running_loop().create_future()
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.gpu.job", argument_of(self.spec)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=variables,
                limit=_LINE_BYTES,
                # Its ranks end with it.
                start_new_session=True,
            )
        self._reading = asyncio.create_task(self._read())

    def give(self, turn: Turn) -> None:
        """Let it use the card."""
        assert self._turn is not None, "a job is started before its turn"
        self._turn.set_result(turn)

    async def ended(self, within_s: float) -> None:
        """Wait for its end, and end it after `within_s` seconds."""
        assert self._reading is not None, "a job is started before its end"
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), within_s)
        except TimeoutError:
            self.error = f"ended after {within_s:.0f} s, with what it had measured"
            await self.kill()

    async def stop(self, within_s: float = _END_S) -> None:
        """Ask a server to end, and kill it where it does not within these seconds; kill another job."""
        if self._process is None or self._reading is None:
            return
        assert self._process.stdin is not None, "a job has a pipe to its stdin"
        self._process.stdin.close()
        if self.spec.kind == "server" and self.told.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), within_s)
        await self.kill()

    async def kill(self) -> None:
        """Kill it and the processes that it started."""
        if self._process is None or self._reading is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), _KILLED_S)

    async def _read(self) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdout is not None, "a job has a pipe from its stdout"
        while line := await self._process.stdout.readline():
            await self._handle(cast(dict[str, JSON], json.loads(line)))
        code = await self._process.wait()
        if code and not self.error:
            self.error = f"ended with code {code}: {self._last_line()} (see {self.log})"
        self.told.set()

    async def _handle(self, message: Mapping[str, JSON]) -> None:
        match message:
            case {"row": dict(row)}:
                self.on_row(self.spec, row)
            case {"note": str(sentence)}:
                self.on_note(self.spec, sentence)
            case {"facts": dict(facts)}:
                self.facts.update(facts)
                self.told.set()
            case {"failed": str(sentence)}:
                self.error = sentence[:_MAX_ERROR_CHARS]
            case {"ask": "quiet"}:
                await self.quiet()
                await self._reply({})
            case {"ask": "ready"}:
                assert self._turn is not None, "it was started"
                await self._reply(cast(dict[str, JSON], asdict(await self._turn)))
            case _:
                raise ValueError(f"a job sent {message!r}")

    async def _reply(self, message: Mapping[str, JSON]) -> None:
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None, "a job has a pipe to its stdin"
        # A job that has ended reads nothing: its exit status tells.
        with suppress(ConnectionError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    def _last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:_MAX_ERROR_CHARS] if lines else "it printed nothing"
