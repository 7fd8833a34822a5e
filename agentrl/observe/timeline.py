"""The timeline of a run: when each side worked, as a Chrome trace, and as shares of columns for a picture.

    a process of the trace                 its tracks
    share of time at work                  a counter for each of `KINDS`, from the run's begin to its end
    the run                                iterations, evaluations, calls of the trainer
    groups | episodes | evaluations        each with its stages, nested

Spans are the newest `MAX_SPANS`, shares have `MAX_BUCKETS` values for each kind: a trace is bounded, however
long the run is. Perfetto and chrome://tracing open it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from agentrl.activity import EPISODES, EVALUATION, GROUPS, KIND_OF, KINDS, RUN, Activities, Span
from agentrl.types import JSON

Piece: TypeAlias = tuple[float, float, float]
"""Begin and end (seconds), and the share of this time in which a kind was at work."""
_SHARES: Final = 1
_PROCESSES: Final = {RUN: 2, GROUPS: 3, EPISODES: 4, EVALUATION: 5}
_TITLES: Final = ("share of time at work", "the run", "groups", "episodes", "evaluations")
_MAX_NAME: Final = 80


class Course(NamedTuple):
    """The work of a kind over all of a run. busy_s: of each bucket, whose length is bucket_s (seconds)."""

    bucket_s: float
    busy_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a run has done so far.

    began_s, now_s: of `time.perf_counter` (seconds). courses: by kind. spans: the newest, by their ends.
    """

    began_s: float
    now_s: float
    courses: Mapping[str, Course]
    spans: Sequence[Span]

    @classmethod
    def of(cls, activities: Activities) -> Timeline:
        """A copy of what the activities of a run are at this moment; on its event loop."""
        courses = {kind: (meter.course, meter.bucket_s) for kind, meter in activities.meters.items()}
        return cls(
            activities.began_s,
            activities.busy.time_s,
            {kind: Course(bucket_s, course) for kind, (course, bucket_s) in courses.items()},
            list(activities.spans),
        )

    def last(self, number: int) -> tuple[float, float] | None:
        """Begin and end of the last iterations, as far as spans reach; None = no iteration has ended."""
        iterations = [span for span in self.spans if span.place == RUN and span.name in _ITERATIONS]
        if not iterations:
            return None
        return max(iterations[-number:][0].start_s, self.spans[0].start_s), iterations[-1].end_s

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
        for pid, title in enumerate(_TITLES, start=_SHARES):
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for kind, course in self.courses.items():
            shares = [round(busy / course.bucket_s, 3) for busy in course.busy_s]
            at_us = 0.0
            for share, equal in groupby([*shares, 0.0]):
                yield {"ph": "C", "name": kind, "pid": _SHARES, "ts": at_us, "args": {"share": share}}
                at_us += len(list(equal)) * course.bucket_s * 1e6
        for span in self.spans:
            yield self._event(span)

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
        spans = (span for span in self.spans if KIND_OF.get((span.place, span.name)) == kind)
        until_s = float("-inf")
        for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
            if end_s > until_s:
                yield max(start_s, until_s), end_s, 1.0
                until_s = end_s

    def _event(self, span: Span) -> Mapping[str, JSON]:
        name = f"{span.name} {span.what}" if span.what else span.name
        return {
            "ph": "X",
            "name": name[:_MAX_NAME],
            "cat": KIND_OF.get((span.place, span.name), span.name)[:_MAX_NAME],
            "pid": _PROCESSES[span.place],
            # What the run does itself may overlap: a row for each of its stages.
            "tid": _row(span.name) if span.place == RUN else span.lane,
            "ts": round((span.start_s - self.began_s) * 1e6, 1),
            "dur": round((span.end_s - span.start_s) * 1e6, 1),
            "args": {"of": span.owner},
        }


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


def _row(name: str) -> int:
    """The row of a stage of the run: those of the trainer after all others."""
    return KINDS.index(name) + 2 if name in KINDS else 1
