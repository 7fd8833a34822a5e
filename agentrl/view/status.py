"""The status of a run as text: for the console, for `agentrl runs status`, and the warning of a hang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from agentrl.records.status import BETWEEN, InProgress, Oldest, ProcessStatus, RunStatus
from agentrl.runtime.activity import ACT, ENDED, EPISODE, LOADS, OF_TRAINER, RESTS, SERVES, WAIT
from agentrl.view.scores import time_text

_STAGES: Final = {
    ACT: "waiting for the engine",
    WAIT: "waiting for a slot",
    "tool": "in the tool",
    "reward": "in the reward",
    "generate": "in the generate function",
    "reset": "in reset() of the environment",
    "step": "in step() of the environment",
    "close": "in close() of the environment",
    EPISODE: BETWEEN,
}
_WIDTH: Final = 16
_NAMED: Final = 4
_STARTED: Final = frozenset({SERVES, LOADS, RESTS, ENDED})


def stage_text(stage: InProgress) -> str:
    """What is done in a stage: `in the tool search`."""
    text = _STAGES.get(stage.name, stage.name if stage.name == BETWEEN else f"in {stage.name}")
    if not stage.what:
        return text
    return f"{text} of {stage.what}" if stage.name == WAIT else f"{text} {stage.what}"


def blame_text(status: RunStatus) -> str:
    """Why a run hangs: the oldest group, its episode, their stage and since when; the trainer's calls."""
    parts = [f"no progress for {time_text(status.idle_s)}"]
    if status.event_loop:
        parts.append(
            f"the event loop is held at {status.event_loop}, by code that is called in it and does not return"
        )
    parts += [f"in {_named(work)} {_since(work.since, status.time)}" for work in status.working]
    if any(work.name in OF_TRAINER for work in status.working):
        parts += _ranks_text(status.processes)
    if status.oldest is not None:
        parts.append(oldest_text(status.oldest, status.time))
    parts += [f"{who} waits for {what}" if who != "new groups" else f"{who} wait for {what}"
              for who, what in status.waits.items()]  # fmt: skip
    return "; ".join(parts) + "."


def oldest_text(oldest: Oldest, now: datetime) -> str:
    """The oldest group, its episode that waits for longest, the stage, and since when."""
    where = f"{stage_text(oldest.stage)} {_since(oldest.stage.since, now)}"
    if oldest.group is None:
        return f"episode {_id(oldest.episode)} of an evaluation is {where}"
    at = f" at {oldest.group.what}" if oldest.group.what else ""
    group = f"the oldest group is {oldest.group.name}{at}, {_since(oldest.group.since, now)}"
    whose = "it" if oldest.episode is None else f"its episode {oldest.episode.name}"
    return f"{group}; {whose} is {where}"


def figures_of(status: RunStatus) -> dict[str, str]:
    """The status in short, for a progress bar."""
    used = status.utilisation
    return {"engine": f"{used.engine:.0%} busy", "trainer": f"{used.trainer:.0%} busy"}


def starting_of(status: RunStatus) -> dict[str, str]:
    """What the processes of a run do while they start, for a progress bar: each phase, and who is in it."""
    phases: dict[str, list[str]] = {}
    for name, process in status.processes.items():
        if process.doing is not None and process.doing.name not in _STARTED:
            phases.setdefault(process.doing.name, []).append(name)
    return {phase: _listed(names) for phase, names in phases.items()}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def status_lines(status: RunStatus, state: str, now: datetime | None = None) -> Iterator[str]:
    """The status as lines. state: of the run. now: when it is read; left out, the present."""
    age_s = ((now or datetime.now(UTC)) - status.time).total_seconds()
    yield _line("state", f"{state}, as of {time_text(age_s)} ago")
    if status.step is not None:
        yield _line("step", f"{status.step} of {status.steps}")
    for work in status.working:
        yield _line("in", f"{_named(work)} {_since(work.since, status.time)}")
    if status.start:
        took = (f"{name} {time_text(seconds)}" for name, seconds in status.start.items())
        yield _line("start", f"so far {', '.join(took)}")
    if status.served is not None:
        yield _line("versions", f"{status.served} served, {status.training} in training")
    shares = status.utilisation
    yield _line(
        "utilisation",
        f"engine {shares.engine:.0%} ({status.requests} requests now), trainer {shares.trainer:.0%}, "
        f"both {shares.both:.0%}, of the last {time_text(shares.seconds)}",
    )
    if status.places is not None:
        places = status.places
        yield _line(
            "places",
            f"{places.taken} of {places.capacity} taken: {places.in_flight} in flight, {places.waiting} "
            f"waiting, {places.in_training} in training",
        )
    if status.staleness is not None:
        for name, counts in (("flight", status.staleness.flight), ("queue", status.staleness.queue)):
            groups = ", ".join(f"{versions}: {number}" for versions, number in sorted(counts.items()))
            yield _line("staleness", f"in {name:<6} {groups} (versions: groups of the last batch)")
    for stage, number in status.episodes.items():
        yield _line("episodes", f"{number} {_STAGES.get(stage, stage)}")
    if status.oldest is not None:
        yield _line("oldest", oldest_text(status.oldest, status.time))
    for who, what in status.waits.items():
        yield _line("waits", f"{who} for {what}")
    yield from _process_lines(status)
    if status.dashboard:
        yield _line("dashboard", status.dashboard)
    if status.event_loop:
        yield _line("event loop", f"held at {status.event_loop}")
    yield _line("last progress", f"{time_text(status.idle_s)} before")


def _process_lines(status: RunStatus) -> Iterator[str]:
    """A table: the name, where it is, the version that it serves, what it does or waits for."""
    rows = [
        (process.where, "" if process.version is None else f"version {process.version}")
        for process in status.processes.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for (name, process), row in zip(status.processes.items(), rows, strict=True):
        texts = (f"{text:<{width}}" for text, width in zip(row, widths, strict=True) if width)
        yield _line(name, "  ".join((*texts, process_text(process, status.time)))).rstrip()


def process_text(process: ProcessStatus, now: datetime) -> str:
    """What a process does or waits for; "" = that is not known."""
    if process.groups:
        episodes = (f"{number} {_STAGES.get(stage, stage)}" for stage, number in process.episodes.items())
        groups = f"{process.groups} group{'' if process.groups == 1 else 's'}"
        return ": ".join(filter(None, (groups, ", ".join(episodes))))
    if process.waits_since is not None:
        return f"waits for {process.waits_for} {_since(process.waits_since, now)}"
    return "" if process.doing is None else f"{_named(process.doing)} {_since(process.doing.since, now)}"


def _ranks_text(processes: Mapping[str, ProcessStatus]) -> Iterator[str]:
    """The ranks that a call of the trainer waits for: any of them may be the one that hangs."""
    ranks = [
        f"{name} ({process.where})"
        for name, process in processes.items()
        if name.startswith("rank ") and process.doing is not None
    ]
    if ranks:
        yield f"the trainer waits for {_listed(ranks)}"


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}} {text}"


def _id(episode: InProgress | None) -> str:
    return "" if episode is None else episode.name


def _named(work: InProgress) -> str:
    return f"{work.name} ({work.what})" if work.what else work.name


def _since(since: datetime, now: datetime) -> str:
    """`since 14:03:11 (5 min 52 s)`, in local time."""
    return f"since {since.astimezone():%H:%M:%S} ({time_text((now - since).total_seconds())})"
