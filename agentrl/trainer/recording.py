"""Recordings of one step of a run on a trainer's rank: a Chrome trace, and what memory was allocated."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity, profile

_MEMORY_ROWS = 40


class Phase(NamedTuple):
    """A phase of a step in the run's process. start_s, end_s: of one clock (seconds)."""

    name: str
    start_s: float
    end_s: float


class Recording(NamedTuple):
    """What is recorded of step `step`, and where. trace, memory: the folders; None = it is not recorded."""

    step: int
    trace: Path | None
    memory: Path | None

    def file(self, folder: Path, name: str) -> Path:
        """A file of this step in one of the folders."""
        return folder / f"step_{self.step:06}-{name}"


class Recorder:
    """The part of a worker that records a step.

    A trace is a JSON file for Perfetto and chrome://tracing: the operators of this rank, its kernels where it
    has a GPU, and the phases of the run. Memory is a table: what each operator allocated and freed; of a rank
    that computes on a GPU also a snapshot for torch's memory viewer (torch.cuda.memory).
    """

    _profile: profile | None = None
    _records_gpu = False

    def start_recording(self, recording: Recording) -> None:
        """Record this rank from now on."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
            self._records_gpu = recording.memory is not None
        if self._records_gpu:
            torch.cuda.memory._record_memory_history()
        self._profile = profile(activities=activities, profile_memory=recording.memory is not None)
        self._profile.start()

    def write_recording(self, recording: Recording, phases: Sequence[Phase]) -> OSError | None:
        """End the recording and write this rank's files. phases: of the step, in seconds since 1970.

        Returns:
            why they cannot be written; None = they are.
        """
        assert self._profile is not None, "a recording is written once, after it was started"
        recorded, self._profile = self._profile, None
        recorded.stop()
        try:
            self._write(recorded, recording, phases)
        except OSError as error:
            return error
        finally:
            if self._records_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        return None

    def _write(self, recorded: profile, recording: Recording, phases: Sequence[Phase]) -> None:
        name = f"rank-{_rank()}"
        if recording.trace is not None:
            recording.trace.mkdir(parents=True, exist_ok=True)
            _write_trace(recorded, recording.file(recording.trace, f"{name}.json.gz"), phases)
        if recording.memory is not None:
            recording.memory.mkdir(parents=True, exist_ok=True)
            table = recorded.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=_MEMORY_ROWS)
            recording.file(recording.memory, f"{name}.txt").write_text(table, encoding="utf-8")
        if recording.memory is not None and self._records_gpu:
            torch.cuda.memory._dump_snapshot(str(recording.file(recording.memory, f"{name}.pickle")))


def _rank() -> int:
    is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_rank()) if is_joined else 0


def _write_trace(recorded: profile, path: Path, phases: Sequence[Phase]) -> None:
    """The trace of torch, with the phases as a process of their own."""
    plain = path.with_suffix("")
    recorded.export_chrome_trace(str(plain))
    trace = cast(dict[str, object], json.loads(plain.read_bytes()))
    events, base_ns = trace["traceEvents"], trace.get("baseTimeNanoseconds", 0)
    assert isinstance(events, list), "a Chrome trace has a list of events"
    assert isinstance(base_ns, int), "torch gives the time that its microseconds are since"
    events.append({"ph": "M", "name": "process_sort_index", "pid": "run", "args": {"sort_index": -1}})
    for phase in phases:
        start_us = phase.start_s * 1e6 - base_ns / 1e3
        duration_us = (phase.end_s - phase.start_s) * 1e6
        where = {"cat": "phase", "pid": "run", "tid": "phases", "ts": start_us, "dur": duration_us}
        events.append({"ph": "X", "name": phase.name, **where})
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump(trace, file)
    plain.unlink()
