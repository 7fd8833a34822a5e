"""What a run does at this moment, and spans of what it has done.

    Activities                of a run
     g12                     a group; its own stages are those of rewards of groups
        g12-3                 an episode: episode > step > tool
      e7                      an episode of an evaluation
      train                   a call of the trainer
     rank 0, server-1        what other processes of the run do, as far as the driver knows (`Doing`)

Each but the last is an `Activity`, which holds the stages that it is in; `stage` adds and removes them.
Groups and episodes find their run, and stages their episode, by the context of their task. Outside of a run
and of an episode, all of this does nothing.

All of it belongs to the event loop. A stage costs two readings of the clock and a few references: what is
computed of them, is computed by their reader.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import zip_longest
from time import perf_counter
from typing import Final, NamedTuple, Protocol

MAX_BUCKETS: Final = 1_000
"""The buckets of a meter (count)."""
FINEST_S: Final = 0.01
"""The length of a bucket at the beginning (seconds)."""


class Meter:
    """The time in which at least one activity of a kind is in progress, and its course.

    active: those in progress (count). began_s: when the course begins (`time.perf_counter`).
    bucket_s: the length of a bucket of the course (seconds). It doubles whenever there would be more than
    `MAX_BUCKETS`, so the course has all of a run in bounded memory.
    """

    __slots__ = ("_buckets", "_busy_s", "_since_s", "active", "began_s", "bucket_s")

    def __init__(self, began_s: float = 0.0) -> None:
        self.active = 0
        self.began_s, self.bucket_s = began_s, FINEST_S
        self._busy_s = self._since_s = 0.0
        self._buckets: list[float] = []

    def begin(self) -> None:
        """Count one more."""
        if not self.active:
            self._since_s = perf_counter()
        self.active += 1

    def end(self) -> None:
        """Count one less."""
        self.active -= 1
        if not self.active:
            self._settle()

    def set_busy(self, is_busy: bool) -> None:
        """Count one, or none."""
        if is_busy != (self.active > 0):
            (self.begin if is_busy else self.end)()

    @property
    def busy_s(self) -> float:
        """Seconds so far in which one was in progress."""
        return self._busy_s + (perf_counter() - self._since_s if self.active else 0.0)

    @property
    def course(self) -> list[float]:
        """The busy seconds of each bucket, up to the last one that has any."""
        if self.active:
            self._settle()
        return list(self._buckets)

    def _settle(self) -> None:
        """Add the time since the first of those in progress began, or since it was added last."""
        start_s, self._since_s = self._since_s, perf_counter()
        self._busy_s += self._since_s - start_s
        end_s = self._since_s - self.began_s
        while end_s >= MAX_BUCKETS * self.bucket_s:
            pairs = zip_longest(self._buckets[::2], self._buckets[1::2], fillvalue=0.0)
            self._buckets = [first + second for first, second in pairs]
            self.bucket_s *= 2
        at_s = start_s - self.began_s
        last = int(end_s / self.bucket_s)
        self._buckets += [0.0] * (last + 1 - len(self._buckets))
        for index in range(int(at_s / self.bucket_s), last + 1):
            until_s = min((index + 1) * self.bucket_s, end_s)
            self._buckets[index] += max(until_s - at_s, 0.0)
            at_s = max(at_s, until_s)


class Busy(NamedTuple):
    """How long each side has worked, up to a moment (seconds).

    time_s: of `time.perf_counter`. engine_s: at least one request was at the engine, and it had its memory.
    trainer_s: a call of the trainer was in progress. both_s: both.
    """

    time_s: float = 0.0
    engine_s: float = 0.0
    trainer_s: float = 0.0
    both_s: float = 0.0

    def since(self, earlier: Busy) -> Busy:
        """The time between an earlier moment and this one."""
        return Busy(*(now - before for now, before in zip(self, earlier, strict=True)))


GROUP, EPISODE, ACT, WAIT = "group", "episode", "act", "wait"
"""Stages: all of a group, all of an episode; of an episode a turn of an agent, and waiting for a slot."""
TAKE, SCORE, TRAIN, PUBLISH, CHECKPOINT = "take", "score", "train", "publish", "checkpoint"
"""Waiting for the groups of a batch; calls of the trainer."""
READS, STARTS_ENGINE, STARTS_RANKS, LOADS_STATE = (
    "reading the checkpoint",
    "starting the engine",
    "starting the ranks",
    "loading the checkpoint",
)
"""What a run does before its first iteration, beside the stages of a run and the above."""
RUN, GROUPS, EPISODES, EVALUATION = "run", "groups", "episodes", "evaluation"
"""Places: of calls of the trainer, iterations and the like; of groups; of their episodes; of evaluations."""
PROCESS: Final = "process"
"""The place of what another process does as a whole: a rank's calls, a server's service."""
SERVES, LOADS, RESTS = "in service", "gets weights", "without memory"
OUT, STARTS = "out of service", "starts again"
"""Stages of an engine's process; the last two of a server alone."""
STARTING: Final = "starting"
"""The stage of a player until its first report."""
ENDED: Final = "ended"
"""The stage of a process that the run has ended."""
OF_TRAINER: Final = frozenset({SCORE, TRAIN, PUBLISH, CHECKPOINT})
"""Those of the trainer alone."""
KIND_OF: Final = {
    (EPISODES, ACT): "play",
    (EPISODES, "tool"): "tool",
    (EPISODES, "reward"): "reward",
    (GROUPS, "reward"): "reward",
    (EVALUATION, EPISODE): "eval",
    **{(RUN, name): name for name in (SCORE, TRAIN, PUBLISH, CHECKPOINT)},
}
"""The kind of work that a stage is, by its place and its name; others are of none."""
KINDS: Final = ("play", "tool", "reward", "eval", SCORE, TRAIN, PUBLISH, CHECKPOINT)
"""The rows of a timeline: turns of the policy, calls of tools, rewards; evaluations; calls of the trainer."""
MAX_SPANS: Final = 20_000
"""The newest spans that are kept (count)."""


class Mark(Protocol):
    """A stage that an activity is in.

    name: of the stage. what: more of it, such as the name of a tool; may be "". since_s: its begin, of
    `time.perf_counter` (seconds).
    """

    name: str
    what: str
    since_s: float


class Span(NamedTuple):
    """A stage that has ended. start_s, end_s: of `time.perf_counter` (seconds).

    name, what: of its mark. owner: the id of its activity. place: of that; activities of one place and lane
    follow each other, but those of the run itself, which have no lanes. process: in which it was, such as
    `player 0`; "" = the driver.
    """

    name: str
    what: str
    owner: str
    place: str
    lane: int
    start_s: float
    end_s: float
    process: str = ""


class Doing(NamedTuple):
    """What another process of a run does. since_s: of `time.perf_counter` (seconds).

    name: its stage; "" = none, and it waits for `what`. what: more of it, such as a reason. where: the
    process is; "" = others know that. version: of the weights that it serves; None = none.
    """

    name: str
    what: str
    since_s: float
    where: str = ""
    version: int | None = None

    def span(self, process: str, end_s: float) -> Span:
        """The span of the stage, which has ended."""
        return Span(self.name, self.what, process, PROCESS, 1, self.since_s, end_s, process)


class Activities:
    """All that is in progress in a run, and the newest of what has ended.

    in_progress: groups, episodes of evaluations, calls of the trainer, in the order of their start.
    num_events: begins and ends of stages, requests and calls so far (count): a run in which it stands still
    makes no progress. num_requests: at the engine (count). meters: of each of `KINDS`. spans: the newest of
    those that have ended. processes: what other processes do, by their names.
    """

    def __init__(self) -> None:
        self.in_progress: dict[Activity, None] = {}
        self.num_events = self.num_requests = 0
        self._is_engine_released = False
        self.began_s = perf_counter()
        self.meters = {kind: Meter(self.began_s) for kind in KINDS}
        self.spans = deque[Span](maxlen=MAX_SPANS)
        self.processes: dict[str, Doing] = {}
        self._engine, self._trainer, self._both = (Meter(self.began_s) for _ in range(3))
        self._lanes: dict[str, _Lanes] = {}

    @contextmanager
    def observed(self) -> Iterator[Activities]:
        """In this block, and in the tasks that it starts, groups, episodes and calls belong to this run."""
        outer = _run.get()
        _run.set(self)
        try:
            yield self
        finally:
            _run.set(outer)

    @property
    def busy(self) -> Busy:
        """How long each side has worked until now."""
        meters = (self._engine, self._trainer, self._both)
        return Busy(perf_counter(), *(meter.busy_s for meter in meters))

    def begin(self, place: str, name: str) -> None:
        """Count a stage that begins."""
        self.num_events += 1
        kind = KIND_OF.get((place, name))
        if kind is not None:
            self.meters[kind].begin()
            if kind in OF_TRAINER:
                self._trainer.begin()
                self._compare()

    def end(self, span: Span) -> None:
        """Keep the span of a stage that ends now."""
        self.num_events += 1
        self.spans.append(span)
        kind = KIND_OF.get((span.place, span.name))
        if kind is not None:
            self.meters[kind].end()
            if kind in OF_TRAINER:
                self._trainer.end()
                self._compare()

    def enter(
        self, process: str, name: str, what: str = "", *, where: str = "", version: int | None = None
    ) -> None:
        """Another process enters a stage now, and leaves the one before; any thread may call this."""
        before, now_s = self.processes.get(process), perf_counter()
        if before is not None and before.name not in ("", ENDED):
            self.spans.append(before.span(process, now_s))
        self.processes[process] = Doing(name, what, now_s, where, version)

    def begin_request(self) -> None:
        """Count a request to the engine."""
        self.num_events += 1
        self.num_requests += 1
        self._compare()

    def end_request(self) -> None:
        """Count its end."""
        self.num_events += 1
        self.num_requests -= 1
        self._compare()

    def set_engine_released(self, is_released: bool) -> None:
        """The engine has given up its memory, so that its requests are held; or it has it again."""
        self._is_engine_released = is_released
        self._compare()

    def lanes(self, place: str) -> _Lanes:
        """The lanes of a place."""
        return self._lanes.setdefault(place, _Lanes())

    def _compare(self) -> None:
        is_decoding = self.num_requests > 0 and not self._is_engine_released
        self._engine.set_busy(is_decoding)
        self._both.set_busy(is_decoding and self._trainer.active > 0)


class _Lanes:
    """Numbers from 1, of which the lowest that is free is taken next."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._highest = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._highest += 1
        return self._highest

    def free(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class Activity:
    """A group, an episode, a call of the trainer: in progress while its block runs.

    id: such as g12-3, or the name of a call; what: more of it. marks: the stages that it is in, the outermost
    first; tools and agents may be in theirs at the same time. parts: the episodes of a group that are in
    play, in the order of their start. process: that plays it; "" = the driver.
    """

    __slots__ = (
        *("_activities", "_lane", "_outer", "_siblings"),
        *("id", "marks", "parts", "place", "process", "since_s", "what"),
    )

    def __init__(self, activities: Activities, id: str, place: str, siblings: dict[Activity, None]) -> None:
        self.id, self.place, self.what = id, place, ""
        self.marks: dict[Mark, None] = {}
        self.parts: dict[Activity, None] = {}
        self.since_s, self.process = 0.0, ""
        self._activities, self._siblings = activities, siblings

    def __enter__(self) -> Activity:
        self._siblings[self] = None
        self._outer = current_activity()
        _activity.set(self)
        self._lane = self._activities.lanes(self.place).take()
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._name, self.what, self.since_s)
        self._activities.lanes(self.place).free(self._lane)
        _activity.set(self._outer)
        del self._siblings[self]

    def begin(self, mark: Mark) -> None:
        """Enter a stage."""
        mark.since_s = perf_counter()
        self.marks[mark] = None
        self._activities.begin(self.place, mark.name)

    def end(self, mark: Mark) -> None:
        """Leave a stage, and record its span."""
        del self.marks[mark]
        self._end(mark.name, mark.what, mark.since_s)

    @property
    def innermost(self) -> Mark | None:
        """The stage that began last; None = the activity is between two."""
        return next(reversed(self.marks), None)

    @property
    def _name(self) -> str:
        return GROUP if self.place == GROUPS else EPISODE

    def _begin(self) -> None:
        self.since_s = perf_counter()
        self._activities.begin(self.place, self._name)

    def _end(self, name: str, what: str, since_s: float) -> None:
        self._activities.end(Span(name, what, self.id, self.place, self._lane, since_s, perf_counter()))


class _Working(Activity):
    """What a run does itself: a call of the trainer, an iteration. It is no context of other activities."""

    __slots__ = ()

    def __init__(self, activities: Activities, kind: str, what: str) -> None:
        super().__init__(activities, kind, RUN, activities.in_progress)
        self.what, self._lane = what, 0

    def __enter__(self) -> Activity:
        self._siblings[self] = None
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self.id, self.what, self.since_s)
        del self._siblings[self]

    @property
    def _name(self) -> str:
        return self.id


class _Request:
    """The block of a request to the engine."""

    __slots__ = ("_activities",)

    def __init__(self, activities: Activities) -> None:
        self._activities = activities

    def __enter__(self) -> None:
        self._activities.begin_request()

    def __exit__(self, *_: object) -> None:
        self._activities.end_request()


def group_in_play(id: str) -> AbstractContextManager[object]:
    """The block in which a group is played and scored; episodes that are played inside are its parts."""
    activities = _run.get()
    return _NOTHING if activities is None else Activity(activities, id, GROUPS, activities.in_progress)


def in_play(id: str) -> AbstractContextManager[object]:
    """The block in which an episode is played and scored."""
    activities, group = _run.get(), current_activity()
    if activities is None:
        return _NOTHING
    if group is None:
        return Activity(activities, id, EVALUATION, activities.in_progress)
    return Activity(activities, id, EPISODES, group.parts)


def working(kind: str, what: str = "") -> AbstractContextManager[object]:
    """The block of a call of the trainer, an iteration or an evaluation."""
    activities = _run.get()
    return _NOTHING if activities is None else _Working(activities, kind, what)


def requesting() -> AbstractContextManager[object]:
    """The block of a request to the engine."""
    activities = _run.get()
    return _NOTHING if activities is None else _Request(activities)


def set_engine_released(is_released: bool) -> None:
    """The engine of the run has given up its memory, or has it again."""
    if (activities := _run.get()) is not None:
        activities.set_engine_released(is_released)


_NOTHING: Final = nullcontext()
_run: ContextVar[Activities | None] = ContextVar("agentrl_activities", default=None)
_activity: ContextVar[Activity | None] = ContextVar("agentrl_activity", default=None)
current_activities: Final = _run.get
"""The activities of the run in whose block this is called; None = there is no run."""
current_activity: Final = _activity.get
"""The group or episode whose stage begins here; None = there is none."""
