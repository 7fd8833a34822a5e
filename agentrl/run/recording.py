"""Recordings of single steps, by flag: a Chrome trace, and the memory of every process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentrl.errors import TrainerError
from agentrl.records.config import ObserveConfig
from agentrl.run.stages import process_tree
from agentrl.trainer.recording import Phase, Recording

_MB = 1024


class RecordingTrainer(Protocol):
    """A trainer whose ranks can record a step."""

    async def start_recording(self, recording: Recording) -> None:
        """Record every rank from now on."""

    async def write_recording(self, recording: Recording, phases: Sequence[Phase]) -> None:
        """End the recording; every rank writes its files."""


@dataclass(frozen=True, slots=True)
class StepRecorder:
    """Records the steps that `config` names, in the run's folder. on_event: gets sentences for the user."""

    config: ObserveConfig
    trainer: RecordingTrainer
    folder: Path
    on_event: Callable[[str], None]

    @asynccontextmanager
    async def step(self, step: int) -> AsyncIterator[list[Phase]]:
        """Record the block, if it is a step that is to be recorded: from 1, as in metrics.jsonl.

        The block appends the step's phases to what it receives, in seconds of `time.perf_counter`. Of a block
        that raises, what was recorded until then is written, too.
        """
        phases: list[Phase] = []
        recording = self._recording(step)
        if recording is None:
            yield phases
            return
        await self.trainer.start_recording(recording)
        succeeded = False
        try:
            yield phases
            succeeded = True
        finally:
            # Ranks that have failed write nothing, and the block has raised why.
            with suppress(*(() if succeeded else (TrainerError,))):
                await self._write(recording, phases)

    async def _write(self, recording: Recording, phases: Sequence[Phase]) -> None:
        since_1970 = time.time() - time.perf_counter()
        shifted = [Phase(name, start + since_1970, end + since_1970) for name, start, end in phases]
        try:
            await self.trainer.write_recording(recording, shifted)
            if recording.memory is not None:
                path = recording.file(recording.memory, "processes.txt")
                path.write_text("\n".join(memory_table()) + "\n", encoding="utf-8")
        except OSError as error:
            self.on_event(f"Warning: step {recording.step} could not be recorded ({error}); the run goes on.")
            return
        folders = " and ".join(str(folder) for folder in (recording.trace, recording.memory) if folder)
        self.on_event(f"Step {recording.step} is recorded in {folders}.")

    def _recording(self, step: int) -> Recording | None:
        # Ranks have other working directories.
        folder = self.folder.resolve()
        trace = folder / "profile" if step == self.config.profile_step else None
        memory = folder / "memory" if step == self.config.memory_snapshot_step else None
        return None if trace is None and memory is None else Recording(step, trace, memory)


def recorded(recorder: StepRecorder | None, step: int) -> AbstractAsyncContextManager[list[Phase]]:
    """The block of a step, for its phases; without a trainer nothing is recorded."""
    return nullcontext(list[Phase]()) if recorder is None else recorder.step(step)


def memory_table() -> list[str]:
    """Resident memory of this process and all its descendants, now and at most (MB); a line for each."""
    rows = [f"{'process':>8} {'RSS MB':>8} {'peak MB':>8}  command"]
    for pid in process_tree():
        # A process may end while its files are read.
        with suppress(OSError, KeyError):
            lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
            status = dict(line.split(":", 1) for line in lines)
            now, peak = (int(status[name].split()[0]) // _MB for name in ("VmRSS", "VmHWM"))
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            rows.append(f"{pid:>8} {now:>8} {peak:>8}  {command[:100]}")
    return rows
