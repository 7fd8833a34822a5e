"""The activities of another process in those of a run: reports of what it does, several a second.

Times in a report are of that process's clock; they are converted where it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from agentrl.records.clock import Moment, PeerClock, now
from agentrl.runtime.activity import (
    ENDED,
    EPISODES,
    GROUPS,
    KINDS,
    STARTING,
    Activities,
    Activity,
    Doing,
    Mark,
    Span,
)


class MirroredStage(NamedTuple):
    """A stage that an activity is in; see `Mark`."""

    name: str
    what: str
    since_s: float


class MirroredPart(NamedTuple):
    """A group or an episode in progress, its stages, and the episodes of a group."""

    id: str
    since_s: float
    stages: tuple[MirroredStage, ...]
    parts: tuple[MirroredPart, ...] = ()


class ActivityReport(NamedTuple):
    """What a process does. num_events: begins and ends since the last report (count), and `spans` of then.

    kinds: those of `KINDS` that are at work at this moment. sent: when it was made. held_at: the code that
    holds the event loop; "" = it is free.
    """

    groups: tuple[MirroredPart, ...]
    spans: tuple[Span, ...]
    num_events: int
    kinds: frozenset[str]
    sent: Moment
    held_at: str = ""


class Reporter:
    """Makes reports of the activities of this process; also in another thread than that of its event loop."""

    def __init__(self, activities: Activities) -> None:
        self._activities = activities
        self._num_events = 0
        self._last: Span | None = None

    def report(self, held_at: str = "") -> ActivityReport:
        """What is in progress, and what has ended since the last report."""
        activities = self._activities
        num_events, self._num_events = activities.num_events - self._num_events, activities.num_events
        spans = []
        for span in reversed(activities.spans.copy()):
            if span is self._last:
                break
            spans.append(span)
        self._last = spans[0] if spans else self._last
        groups = tuple(_part(activity) for activity in list(activities.in_progress))
        kinds = frozenset(kind for kind in KINDS if activities.meters[kind].active)
        return ActivityReport(groups, tuple(reversed(spans)), num_events, kinds, now(), held_at)


def _part(activity: Activity) -> MirroredPart:
    stages = tuple(MirroredStage(mark.name, mark.what, mark.since_s) for mark in list(activity.marks))
    return MirroredPart(
        activity.id, activity.since_s, stages, tuple(_part(part) for part in list(activity.parts))
    )


@dataclass(eq=False, slots=True)
class _Mark:
    name: str
    what: str
    since_s: float


class Mirror:
    """Shows the activities of a process, by its reports, among those of a run. name, number: of the process.

    A kind is at work from one report to the next where it was at the first of these.
    """

    def __init__(self, activities: Activities, name: str, number: int) -> None:
        self._activities, self.name, self._process = activities, name, f"player {number}"
        activities.processes[self._process] = Doing(STARTING, "", perf_counter())
        self._clock = PeerClock()
        self._shown: list[Activity] = []
        self._kinds: frozenset[str] = frozenset()

    def show(self, report: ActivityReport) -> None:
        """Show what the process does, in place of what it did."""
        activities, offset_s = self._activities, self._clock.offset_s(report.sent)
        self._remove()
        what = f"{self.name}, which is held at {report.held_at}" if report.held_at else self.name
        for group in report.groups:
            shown = self._activity(group, offset_s, GROUPS, activities.in_progress)
            shown.what = what
            self._shown.append(shown)
        self._wait(report)
        activities.num_events += report.num_events
        activities.spans.extend(
            span._replace(start_s=span.start_s + offset_s, end_s=span.end_s + offset_s, process=self._process)
            for span in report.spans
        )
        self._work(report.kinds)

    def clear(self) -> None:
        """The process has ended."""
        self._remove()
        self._work(frozenset())
        self._activities.processes[self._process] = Doing(ENDED, "", perf_counter())

    def _wait(self, report: ActivityReport) -> None:
        """Note since when it has no group, while it has none."""
        processes, name = self._activities.processes, self._process
        if report.groups:
            processes.pop(name, None)
        elif name not in processes or processes[name].name in (STARTING, ENDED):
            processes[name] = Doing("", "a group", perf_counter())

    def _activity(
        self, part: MirroredPart, offset_s: float, place: str, siblings: dict[Activity, None]
    ) -> Activity:
        activity = Activity(self._activities, part.id, place, siblings)
        activity.since_s, activity.process = part.since_s + offset_s, self._process
        marks: Iterable[Mark] = (_Mark(s.name, s.what, s.since_s + offset_s) for s in part.stages)
        activity.marks = dict.fromkeys(marks)
        siblings[activity] = None
        for episode in part.parts:
            self._activity(episode, offset_s, EPISODES, activity.parts)
        return activity

    def _remove(self) -> None:
        for activity in self._shown:
            self._activities.in_progress.pop(activity, None)
        self._shown = []

    def _work(self, kinds: frozenset[str]) -> None:
        for kind in kinds - self._kinds:
            self._activities.meters[kind].begin()
        for kind in self._kinds - kinds:
            self._activities.meters[kind].end()
        self._kinds = kinds
