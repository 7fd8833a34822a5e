"""What a run does at this moment: status.json in its folder, which the run writes every few seconds.

Nothing decides by it; the reader is a person, or a program that watches runs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, time
from typing import Final, cast

from pydantic import Field, ValidationError

from agentrl.config import Section
from agentrl.errors import ConfigError
from agentrl.records.timeline import natural
from agentrl.runtime.activity import EVALUATION, GROUPS, RUN, TAKE, Activities, Activity, Busy, Doing
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON

STATUS: Final = "status.json"
_PERIOD_S: Final = 1.0
BETWEEN: Final = "between two stages"
"""The stage of an episode that is in none."""


class InProgress(Section):
    """Something that has begun. name: a stage, or the id of a group or an episode. what: more of it."""

    name: str
    what: str = ""
    since: datetime


class Oldest(Section):
    """The oldest group in play, that episode of it which has been in its stage for longest, and the stage.

    group: None = an evaluation plays. episode: None = its rewards of the group are computed.
    """

    group: InProgress | None
    episode: InProgress | None
    stage: InProgress


class PlacesTaken(Section):
    """The places of the producer (groups), see `agentrl.rollout.occupancy`."""

    capacity: int
    in_flight: int
    waiting: int
    in_training: int
    blocked_by: str

    @property
    def taken(self) -> int:
        """Places that are taken (groups)."""
        return self.in_flight + self.waiting + self.in_training


class GroupStaleness(Section):
    """The staleness of the groups of the last batch: how many (count) by versions.

    flight: from a group's oldest token to its end. queue: from there to its training.
    """

    flight: dict[int, int]
    queue: dict[int, int]


class Utilisation(Section):
    """Shares of the last `seconds`: a request was at the engine, a call of the trainer in progress, both."""

    seconds: float
    engine: float
    trainer: float
    both: float

    @classmethod
    def of(cls, busy: Busy) -> Utilisation:
        """The shares of a span of time."""
        seconds = max(busy.time_s, 1e-9)
        shares = (min(part / seconds, 1.0) for part in busy[1:])
        return cls(**dict(zip(("engine", "trainer", "both"), shares, strict=True)), seconds=busy.time_s)


class ProcessStatus(Section):
    """Another process of a run. where: it runs, or ran last: its process or its address, and its machine.

    doing: its stage; None = none, or it plays. waits_for: what it waits for, since `waits_since`. version: of
    the weights that it serves. groups: that it plays (count). episodes: of these, how many are in each stage.
    """

    where: str = ""
    doing: InProgress | None = None
    waits_for: str = ""
    waits_since: datetime | None = None
    version: int | None = None
    groups: int = 0
    episodes: dict[str, int] = Field(default_factory=dict)


class RunStatus(Section):
    """What a run does at one moment.

    working: calls of the trainer, stages of the run and the like. episodes: of those in play, how many are in
    each stage (count). requests: at the engine (count). served, training: the versions of the engine's and of
    the trainer's weights; None = no iteration has begun, like step, steps and places. waits: who waits for
    what. processes: the other processes of the run, by their names. dashboard: the address of that of its
    cluster; "" = it has none. idle_s: since when nothing has begun or ended (seconds); a pause of the process
    does not count. event_loop: the place of the code that holds the event loop; "" = it is free. start: how
    long what the attempt has done took, by name (seconds), until its first iteration has ended.
    """

    time: datetime
    pid: int
    step: int | None = None
    steps: int | None = None
    served: int | None = None
    training: int | None = None
    places: PlacesTaken | None = None
    staleness: GroupStaleness | None = None
    utilisation: Utilisation
    requests: int
    working: tuple[InProgress, ...]
    episodes: dict[str, int]
    oldest: Oldest | None = None
    waits: dict[str, str] = Field(default_factory=dict)
    processes: dict[str, ProcessStatus] = Field(default_factory=dict)
    dashboard: str = ""
    idle_s: float = 0.0
    event_loop: str = ""
    start: dict[str, float] = Field(default_factory=dict)

    def as_json(self) -> dict[str, JSON]:
        """The status as JSON."""
        return cast(dict[str, JSON], self.model_dump(mode="json"))

    def write(self, folder: Path) -> None:
        """Write status.json, whole or not at all.

        Raises:
            OSError: the disk does not take it.
        """
        write_text(folder / STATUS, json.dumps(self.as_json(), indent=1))


def read_status(folder: Path) -> RunStatus:
    """The last status that a run wrote.

    Raises:
        ConfigError: there is none, or it is not readable.
    """
    try:
        return RunStatus.model_validate_json(read_file(folder / STATUS))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {STATUS}, which `agentrl train` and `agentrl rollout` write while they run; "
            f"`agentrl runs show {folder.name}` shows its records."
        ) from None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is of another version"
        raise ConfigError(f"{folder / STATUS} cannot be read ({reason}); remove that file.") from None


@contextmanager
def announced(folder: Path, name: str, what: str = "") -> Iterator[None]:
    """A block in which a run does only this, on its way to an event loop: a thread writes its status.

    What the disk does not take is left out.
    """
    work, is_over = InProgress(name=name, what=what, since=at(perf_counter())), Event()
    nothing = Utilisation(seconds=0.0, engine=0.0, trainer=0.0, both=0.0)

    def write() -> None:
        while not is_over.is_set():
            now = at(perf_counter())
            status = RunStatus(
                time=now, pid=os.getpid(), utilisation=nothing, requests=0, working=(work,), episodes={}
            )
            with suppress(OSError):
                status.write(folder)
            is_over.wait(_PERIOD_S)

    writing = Thread(target=write, name="agentrl-start", daemon=True)
    writing.start()
    try:
        yield
    finally:
        is_over.set()
        writing.join()


def at(time_s: float) -> datetime:
    """The date of a moment of `time.perf_counter`."""
    return datetime.fromtimestamp(time_s - perf_counter() + time(), UTC)


def working_in(activities: Activities) -> tuple[InProgress, ...]:
    """What the run does itself, in the order of its start."""
    return tuple(
        InProgress(name=activity.id, what=activity.what, since=at(activity.since_s))
        for activity in activities.in_progress
        if activity.place == RUN
    )


def seconds_of(activities: Activities) -> dict[str, float]:
    """How long what the run did itself took, by name (seconds), in the order of the ends."""
    seconds: dict[str, float] = {}
    for span in activities.spans:
        if span.place == RUN:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.end_s - span.start_s
    return seconds


def stages_in(activities: Activities) -> dict[str, int]:
    """How many episodes in play are in each stage (count), the most frequent first."""
    return _stages(activities.in_progress)


def processes_in(activities: Activities, where: Mapping[str, str]) -> dict[str, ProcessStatus]:
    """The other processes of a run. where: each is, as far as the activities do not have it."""
    played: dict[str, list[Activity]] = {}
    for activity in activities.in_progress:
        played.setdefault(activity.process, []).append(activity)
    doing = dict(activities.processes)
    names = sorted({*where, *doing}, key=natural)
    return {name: _process(where.get(name, ""), doing.get(name), played.get(name, [])) for name in names}


def _process(where: str, doing: Doing | None, groups: Sequence[Activity]) -> ProcessStatus:
    if doing is None:
        return ProcessStatus(where=where, groups=len(groups), episodes=_stages(groups))
    where = where or doing.where
    if not doing.name:
        return ProcessStatus(where=where, waits_for=doing.what, waits_since=at(doing.since_s))
    stage = InProgress(name=doing.name, what=doing.what, since=at(doing.since_s))
    return ProcessStatus(where=where, doing=stage, version=doing.version)


def oldest_in(activities: Activities) -> Oldest | None:
    """The group that began first, or an evaluation's episode where no group is in play; None = nothing is."""
    groups = [activity for activity in activities.in_progress if activity.place == GROUPS]
    groups = groups and [min(groups, key=lambda group: group.since_s)]
    parts = [part for activity in groups or activities.in_progress for part in _parts(activity)]
    group = _named(groups[0]) if groups else None
    if not parts:
        return Oldest(group=group, episode=None, stage=_stage(groups[0])) if groups else None
    episode = min(parts, key=lambda part: _stage(part).since)
    return Oldest(group=group, episode=_named(episode), stage=_stage(episode))


def waits_in(activities: Activities, places: PlacesTaken | None) -> dict[str, str]:
    """Who waits for what: the trainer, the engine, new groups; those that work are left out."""
    waits: dict[str, str] = {}
    if any(activity.id == TAKE for activity in activities.in_progress):
        waits["trainer"] = "groups" if places is None else f"groups ({places.waiting} are complete)"
    if not activities.num_requests:
        stages = stages_in(activities)
        if stages:
            waits["engine"] = "episodes, which are in " + ", ".join(f"{s} ({n})" for s, n in stages.items())
        elif places is not None:
            waits["engine"] = "new groups"
    if places is not None and places.blocked_by in _BLOCKERS:
        waits["new groups"] = _BLOCKERS[places.blocked_by]
    return waits


_BLOCKERS: Final[Mapping[str, str]] = {
    "capacity": "a place: all are taken until groups have been trained",
    "window": "the oldest group in flight, at which the staleness window begins",
    "buffer": "the trainer: async_buffer_size complete groups wait for it",
    "update": "new weights, which are on their way to the engine",
    "batch": "the next batch: max_staleness is 0",
    "filter": "nothing any more: max_num_gen_batches were played, and the filter dropped them",
    "end": "nothing any more: the last batch has been started",
}
"""What new groups wait for, by the reason why none starts."""


def _stages(activities: Iterable[Activity]) -> dict[str, int]:
    episodes = [part for activity in activities for part in _parts(activity)]
    return dict(Counter(_stage(episode).name for episode in episodes).most_common())


def _parts(activity: Activity) -> list[Activity]:
    """The episodes of a group, or an evaluation's episode itself."""
    return [activity] if activity.place == EVALUATION else list(activity.parts)


def _named(activity: Activity) -> InProgress:
    return InProgress(name=activity.id, what=activity.what, since=at(activity.since_s))


def _stage(activity: Activity) -> InProgress:
    mark = activity.innermost
    if mark is None:
        return InProgress(name=BETWEEN, since=at(activity.since_s))
    return InProgress(name=mark.name, what=mark.what, since=at(mark.since_s))
