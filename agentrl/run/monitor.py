"""What a run does: for status.json, for the console, for a warning when it hangs, and for the timeline."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeAlias

from agentrl.records.status import (
    GroupStaleness,
    PlacesTaken,
    RunStatus,
    Utilisation,
    at,
    oldest_in,
    processes_in,
    seconds_of,
    stages_in,
    waits_in,
    working_in,
)
from agentrl.records.timeline import Timeline
from agentrl.rollout.producer import Producer
from agentrl.run.loop import Loop, PlayLoop
from agentrl.run.metrics import staleness_counts
from agentrl.runtime.activity import Activities, Busy
from agentrl.runtime.authorship import place_of_frame
from agentrl.types import Group
from agentrl.view.console import StageBar
from agentrl.view.scores import time_text
from agentrl.view.status import blame_text, figures_of, starting_of

PERIOD_S = 1.0
"""Seconds between two samples, and two versions of status.json."""
TRACE_PERIOD_S = 60.0
"""Seconds between two versions of the trace, so that a run which is killed leaves one."""
_WINDOW_S = 60.0
_LATE_PERIODS = 5
"""So many periods after which a sample counts as late: some code holds the event loop."""


Processes: TypeAlias = Callable[[], Mapping[str, str]]
"""Where each of some processes runs now, by its name. It does not block."""


@dataclass(frozen=True, slots=True)
class _Iterations:
    """The iterations that are observed, and the bar that shows them. loop: None = nothing plays."""

    loop: Loop | PlayLoop | None
    bar: StageBar


@dataclass(slots=True)
class _TraceFile:
    """The file of the timeline. taken_s: when the last timeline was taken; `latest` is not written yet."""

    path: Path | None
    taken_s: float
    latest: Timeline | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next timeline is to be taken."""
        return time.perf_counter() - self.taken_s >= TRACE_PERIOD_S

    def take(self, timeline: Timeline) -> None:
        """The state at this moment."""
        self.latest, self.taken_s = timeline, time.perf_counter()

    def write(self) -> None:
        """Write the trace, if there is a new one; what the disk does not take is left out."""
        timeline, self.latest = self.latest, None
        if timeline is not None and self.path is not None:
            with suppress(OSError):
                timeline.write(self.path)


class Monitor:
    """Samples the state of a run each second, on its event loop; a thread writes its files, and warns.

    consumes: the activities of the run, and the places of its producer. waits for: nothing. The thread goes
    on where the event loop is held, and names the code that holds it. at its end: a last status is written.

    Where nothing has begun or ended for `hang_warning_s` seconds (0 = never), `warn` gets a sentence, and
    again whenever twice that time has passed. A pause of the process does not count. trace: the file of the
    timeline, which is written every minute, and at the end. What the disk does not take is left out.

    dashboard: of the run's cluster, for the status; "" = there is none. start: what the attempt did before,
    by name (seconds); None = it has started.
    """

    dashboard = ""
    start: Mapping[str, float] | None = MappingProxyType({})

    def __init__(
        self,
        activities: Activities,
        folder: Path,
        warn: Callable[[str], None],
        *,
        trace: Path | None = None,
        hang_warning_s: float = 0.0,
        period_s: float = PERIOD_S,
    ) -> None:
        self.activities = activities
        self._folder, self._warn = folder, warn
        self._trace = _TraceFile(trace, time.perf_counter())
        self._hang_warning_s = hang_warning_s
        self._period_s = min(period_s, hang_warning_s / 4) if hang_warning_s else period_s
        self._processes: list[Processes] = []
        self._where: dict[str, str] = {}
        self._observed: _Iterations | None = None
        self._starting: StageBar | None = None
        self._begun, self._version = Busy(), 0
        self._staleness: GroupStaleness | None = None
        self._past: deque[Busy] = deque([activities.busy], maxlen=max(int(_WINDOW_S / self._period_s), 1))
        self._sample: RunStatus | None = None
        self._idle_s = 0.0
        # Periods since the last sample.
        self._num_late = 0
        self._contexts = ExitStack()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Monitor:
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        self._contexts.enter_context(self.activities.observed())
        self._refresh()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, ident), name="agentrl-monitor", daemon=True
        )
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._refresh()
        self._write("")
        self._trace.take(self.timeline())
        self._trace.write()
        self._contexts.close()

    def follow(self, processes: Processes) -> None:
        """Have these processes in the status from now on."""
        self._processes.append(processes)

    @contextmanager
    def iterations(self, loop: Loop | PlayLoop | None, bar: StageBar) -> Iterator[None]:
        """In this block the status has the places and versions of the loop; the bar shows it in short.

        loop: None = the steps of the bar are of supervised fine-tuning, which has neither.
        """
        self._observed = _Iterations(loop, bar)
        self.start = None if loop is None else self.start
        try:
            yield
        finally:
            self._observed = None

    @contextmanager
    def starting(self, bar: StageBar) -> Iterator[None]:
        """In this block the bar shows what the processes that start do."""
        self._starting = bar
        try:
            yield
        finally:
            self._starting = None

    def begin(self) -> None:
        """An iteration begins now."""
        self._begun = self.activities.busy
        if self._loop is not None:
            self._version = self._loop.producer.version

    def end(self, groups: Sequence[Group]) -> dict[str, float]:
        """The iteration has ended, whose batch were these groups; its metrics of utilisation."""
        self.start = None
        flight, queue = staleness_counts(groups, version=self._version)
        self._staleness = GroupStaleness(flight=flight, queue=queue)
        plays = self._loop is None or isinstance(self._loop.producer, Producer)
        trains = self._loop is None or isinstance(self._loop, Loop)
        return utilisation_metrics(self.activities.busy.since(self._begun), plays=plays, trains=trains)

    def status(self) -> RunStatus:
        """The state at this moment; on the event loop."""
        activities, observed, loop = self.activities, self._observed, self._loop
        busy = activities.busy
        for processes in self._processes:
            self._where.update(processes())
        places = None if loop is None else _places(loop)
        return RunStatus(
            time=at(busy.time_s),
            pid=os.getpid(),
            step=None if observed is None else observed.bar.done,
            steps=None if observed is None else observed.bar.total,
            served=None if loop is None else loop.producer.version,
            training=None if loop is None else loop.version,
            places=places,
            staleness=self._staleness,
            utilisation=Utilisation.of(busy.since(self._past[0])),
            requests=activities.num_requests,
            start={} if self.start is None else {**self.start, **seconds_of(activities)},
            working=working_in(activities),
            episodes=stages_in(activities),
            oldest=oldest_in(activities),
            waits=waits_in(activities, places),
            processes=processes_in(activities, self._where),
            dashboard=self.dashboard,
        )

    def timeline(self) -> Timeline:
        """What the run has done so far; on the event loop."""
        own = f"process {os.getpid()} on {socket.gethostname()}"
        return Timeline.of(self.activities, {"": own, **self._where})

    @property
    def _loop(self) -> Loop | PlayLoop | None:
        return None if self._observed is None else self._observed.loop

    def _refresh(self) -> None:
        """Take a sample, and show it."""
        self._sample, self._num_late = self.status(), 0
        self._past.append(self.activities.busy)
        if self._trace.is_due:
            self._trace.take(self.timeline())
        if self._observed is not None and self._observed.loop is not None:
            self._observed.bar.note(**figures_of(self._sample))
        if self._starting is not None:
            self._starting.note(**starting_of(self._sample))
            self._starting.show(self._starting)

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        """The thread."""
        num_events, warned_s, now_s = -1, 0.0, time.perf_counter()
        while not self._is_over.wait(self._period_s):
            elapsed_s, now_s = time.perf_counter() - now_s, time.perf_counter()
            # After a pause of the process the thread is late, too.
            self._idle_s += min(elapsed_s, 2 * self._period_s)
            self._num_late += 1
            if self.activities.num_events != num_events:
                if warned_s:
                    self._warn(f"The run goes on, after {time_text(self._idle_s)} without progress.")
                num_events, warned_s, self._idle_s = self.activities.num_events, 0.0, 0.0
            status = self._write(self._held_at(ident))
            self._trace.write()
            if status and self._hang_warning_s and self._idle_s >= max(self._hang_warning_s, 2 * warned_s):
                self._warn(f"Warning: {blame_text(status)}")
                warned_s = self._idle_s
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._refresh)

    def _held_at(self, ident: int) -> str:
        """The place of the code that holds the event loop, if its last sample is late; "" = it is free."""
        if self._num_late <= _LATE_PERIODS:
            return ""
        frame = sys._current_frames().get(ident)
        return "" if frame is None else place_of_frame(frame) or frame.f_code.co_qualname

    def _write(self, event_loop: str) -> RunStatus | None:
        """Write the last sample; returns it."""
        if self._sample is None:
            return None
        status = self._sample.model_copy(update={"idle_s": self._idle_s, "event_loop": event_loop})
        with suppress(OSError):
            status.write(self._folder)
        return status


def utilisation_metrics(busy: Busy, *, plays: bool, trains: bool) -> dict[str, float]:
    """How long each side waited in an iteration, of which `busy` is. plays, trains: the run has that side."""
    seconds = max(busy.time_s, 1e-9)
    metrics: dict[str, float] = {}
    if trains:
        wait_s = max(busy.time_s - busy.trainer_s, 0.0)
        metrics |= {"perf/train_wait_time": wait_s, "perf/wait_time_ratio": wait_s / seconds}
    if plays:
        metrics["perf/rollout_wait_time_ratio"] = max(1.0 - busy.engine_s / seconds, 0.0)
    if plays and trains:
        metrics["perf/overlap_time_ratio"] = min(busy.both_s / seconds, 1.0)
    return metrics


def _places(loop: Loop | PlayLoop) -> PlacesTaken | None:
    """The places of a producer; None = the groups are read from a journal."""
    if not isinstance(loop.producer, Producer):
        return None
    occupancy = loop.producer.occupancy
    return PlacesTaken(
        capacity=occupancy.capacity,
        in_flight=occupancy.in_flight,
        waiting=occupancy.waiting,
        in_training=occupancy.in_training,
        blocked_by=occupancy.blocked_by,
    )
