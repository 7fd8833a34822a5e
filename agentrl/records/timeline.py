"""The timeline of a run: when each side worked, as a Chrome trace, and as shares of columns for a picture.

    a process of the trace    its tracks
    the run                   for each of `KINDS` a counter: the share of time at work, over all of the run
                              iterations, evaluations, calls of the trainer
                              groups, episodes, evaluations that it plays, each with its stages, nested
    player 0 ...              groups and episodes likewise
    rank 0 ...                calls; work on weights that are published, beside them
    engine, server-0 ...      in service, getting weights, without memory, or out of service and why

Each is named with the machine that it runs on.

Spans are the newest `MAX_SPANS`, shares have `MAX_BUCKETS` values for each kind: a trace is bounded, however
long the run is. Perfetto and chrome://tracing open it.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from agentrl.runtime.activity import (
    ENDED,
    EPISODES,
    EVALUATION,
    GROUPS,
    KIND_OF,
    KINDS,
    OUT,
    PROCESS,
    RESTS,
    RUN,
    STARTS,
    Activities,
    Span,
)
from agentrl.types import JSON

Piece: TypeAlias = tuple[float, float, float]
"""Begin and end (seconds), and the share of this time in which a kind was at work."""
_DRIVER: Final = 1
_ROWS: Final = {RUN: 0, PROCESS: 100, GROUPS: 1_000_000, EPISODES: 2_000_000, EVALUATION: 3_000_000}
"""Before the rows of a place in its process."""
_NAMES: Final = {PROCESS: "calls", GROUPS: "group", EPISODES: "episode", EVALUATION: "evaluation"}
"""Names of rows."""
_MAX_NAME, _MAX_TITLE = 80, 160


class Course(NamedTuple):
    """The work of a kind over all of a run. busy_s: of each bucket, whose length is bucket_s (seconds)."""

    bucket_s: float
    busy_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a run has done so far.

    began_s, now_s: of `time.perf_counter` (seconds). courses: by kind. spans: the newest, by their ends.
    where: each process of the run is, by its name; that of the driver is "".
    """

    began_s: float
    now_s: float
    courses: Mapping[str, Course]
    spans: Sequence[Span]
    where: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, activities: Activities, where: Mapping[str, str] | None = None) -> Timeline:
        """A copy of what the activities of a run are at this moment; on its event loop.

        where: as far as the activities do not have it.
        """
        courses = {kind: (meter.course, meter.bucket_s) for kind, meter in activities.meters.items()}
        now_s, processes = activities.busy.time_s, dict(activities.processes)
        in_progress = [
            doing.span(name, now_s) for name, doing in processes.items() if doing.name not in ("", ENDED)
        ]
        return cls(
            activities.began_s,
            now_s,
            {kind: Course(bucket_s, course) for kind, (course, bucket_s) in courses.items()},
            [*activities.spans, *in_progress],
            {name: doing.where for name, doing in processes.items() if doing.where} | dict(where or {}),
        )

    @property
    def processes(self) -> list[str]:
        """All processes but the driver, in the order of their names and numbers."""
        return sorted(({span.process for span in self.spans} | self.where.keys()) - {""}, key=natural)

    def last(self, number: int) -> tuple[float, float] | None:
        """Begin and end of the last iterations, as far as spans reach; None = no iteration has ended."""
        iterations = [span for span in self.spans if span.place == RUN and span.name in _ITERATIONS]
        if not iterations:
            return None
        return max(iterations[-number:][0].start_s, self.spans[0].start_s), iterations[-1].end_s

    def columns_of(self, process: str, number: int, window: tuple[float, float]) -> list[float]:
        """The share of time in which a process was at work; otherwise as `columns`.

        An engine is where it is in service or gets weights.
        """
        spans = (
            span
            for span in self.spans
            if span.process == process and span.place in (GROUPS, PROCESS) and span.name not in _AWAY
        )
        return _columns(_united(spans), number, *window)

    def columns(self, kind: str, number: int, window: tuple[float, float] | None = None) -> list[float]:
        """The share of time in which a kind was at work, for each column of a picture.

        number: of columns (count). window: begin and end of the picture; None = all of the run.
        """
        if window is not None:
            return _columns(self._intervals(kind), number, *window)
        bucket_s, busy_s = self.courses[kind]
        pieces = ((n * bucket_s, (n + 1) * bucket_s, busy / bucket_s) for n, busy in enumerate(busy_s))
        return _columns(pieces, number, 0.0, self.now_s - self.began_s)

    def events(self) -> Iterator[Mapping[str, JSON]]:
        """The events of the trace; times are microseconds since the run began."""
        pids = {name: pid for pid, name in enumerate(("", *self.processes), start=_DRIVER)}
        for name, pid in pids.items():
            where = f" ({self.where[name]})" if self.where.get(name) else ""
            shown: dict[str, JSON] = {"name": f"{name or 'the run'}{where}"[:_MAX_TITLE]}
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": shown}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for (name, row), title in sorted({(s.process, _row(s)): _row_name(s) for s in self.spans}.items()):
            at: dict[str, JSON] = {"ph": "M", "pid": pids[name], "tid": row}
            yield {**at, "name": "thread_name", "args": {"name": title}}
            yield {**at, "name": "thread_sort_index", "args": {"sort_index": row}}
        for kind, course in self.courses.items():
            shares = [round(busy / course.bucket_s, 3) for busy in course.busy_s]
            at_us = 0.0
            for share, equal in groupby([*shares, 0.0]):
                yield {"ph": "C", "name": kind, "pid": _DRIVER, "ts": at_us, "args": {"share": share}}
                at_us += len(list(equal)) * course.bucket_s * 1e6
        for span in self.spans:
            yield self._event(span, pids[span.process])

    def write(self, path: Path) -> None:
        """Write the trace, whole or not at all.

        Raises:
            OSError: the disk does not take it.
        """
        part = path.with_name(f"{path.name}.part")
        path.parent.mkdir(exist_ok=True)
        try:
            # Event by event: the encoder holds the GIL for a whole value.
            with gzip.open(part, "wt", encoding="utf-8", compresslevel=3) as file:
                file.write('{"traceEvents": [')
                for number, event in enumerate(self.events()):
                    file.write(f"{',' if number else ''}\n{json.dumps(event)}")
                file.write('\n], "displayTimeUnit": "ms"}\n')
            os.replace(part, path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _intervals(self, kind: str) -> Iterator[Piece]:
        """When at least one span of the kind was in progress: intervals that do not overlap."""
        yield from _united(s for s in self.spans if KIND_OF.get((s.place, s.name)) == kind)

    def _event(self, span: Span, pid: int) -> Mapping[str, JSON]:
        name = f"{span.name} {span.what}" if span.what else span.name
        return {
            "ph": "X",
            "name": name[:_MAX_NAME],
            "cat": KIND_OF.get((span.place, span.name), span.name)[:_MAX_NAME],
            "pid": pid,
            "tid": _row(span),
            "ts": round((span.start_s - self.began_s) * 1e6, 1),
            "dur": round((span.end_s - span.start_s) * 1e6, 1),
            "args": {"of": span.owner},
        }


def _united(spans: Iterable[Span]) -> Iterator[Piece]:
    """When at least one of the spans was in progress: intervals that do not overlap."""
    until_s = float("-inf")
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if end_s > until_s:
            yield max(start_s, until_s), end_s, 1.0
            until_s = end_s


def _columns(pieces: Iterable[Piece], number: int, start_s: float, end_s: float) -> list[float]:
    width_s = max(end_s - start_s, 1e-9) / number
    shares = [0.0] * number
    for begin_s, until_s, share in pieces:
        at, last = max((begin_s - start_s) / width_s, 0.0), min((until_s - start_s) / width_s, number)
        column = int(at)
        while at < last:
            following = min(column + 1, last)
            shares[column] += share * (following - at)
            at, column = following, column + 1
    return [min(share, 1.0) for share in shares]


_ITERATIONS: Final = frozenset({"RL", "rollout"})
_AWAY: Final = frozenset({OUT, STARTS, RESTS})


def _row(span: Span) -> int:
    """The row of a span in its process. What the run does itself may overlap: a row for each stage."""
    if span.place != RUN:
        return _ROWS[span.place] + span.lane
    return KINDS.index(span.name) + 2 if span.name in KINDS else 1


def _row_name(span: Span) -> str:
    if span.place == RUN:
        return span.name if span.name in KINDS else "iterations"
    return _NAMES[span.place] if span.lane == 1 else f"{_NAMES[span.place]}, row {span.lane}"


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `rank 2` before `rank 10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
