"""From an iteration to the journal's entries, every episode once with its outcome; and back to groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from agentrl.algorithms.filters import ZERO_STD, has_signal
from agentrl.errors import ConfigError
from agentrl.records import Entry, Outcome, read_journal
from agentrl.records.history import JOURNAL
from agentrl.records.journal import SUFFIX
from agentrl.rollout.group import GroupOutcome
from agentrl.run.loop import BatchInProgress, Iteration
from agentrl.types import Episode, Group, RolloutId

BROKEN_GROUP = "group_incomplete"
NO_GRADIENT = "zero_advantage"
STOPPED = "run_stopped"
GREEDY_BASELINE = "greedy_baseline"
REMOVED = "sample_filter/"
"""Begins the reason of an episode that a filter took out of the loss of its batch."""
_EPISODE = re.compile(r"(?P<group>g(?P<ordinal>\d+))-")


def iteration_entries(iteration: Iteration) -> Iterator[Entry]:
    """Trained or recorded groups; groups without a gradient; dropped groups; failed episodes with the
    failure's name."""
    outcomes = {group.id: Outcome.TRAINED for group in iteration.trained}
    outcomes |= {group.id: Outcome.RECORDED for group in iteration.recorded}
    for played in iteration.outcomes:
        yield from _failed(played.failed)
        if played.reason:
            yield from _dropped(played)
        elif played.group is None:
            for episode in played.finished:
                yield Entry(episode, (), Outcome.DROPPED, BROKEN_GROUP)
        else:
            outcome = outcomes.get(played.group.id, Outcome.DROPPED)
            yield from _group(played.group, outcome, iteration)


def leftover_entries(outcomes: Iterable[GroupOutcome], in_progress: BatchInProgress) -> Iterator[Entry]:
    """Entries of the groups that were left when the run stopped: of the batch in progress, then of the queue.

    Of the batch, only the groups of finished optimizer steps are trained.
    """
    for outcome in in_progress.outcomes:
        if outcome.group is not None and outcome.group.id in in_progress.trained:
            yield from _failed(outcome.failed)
            yield from _group(outcome.group, Outcome.TRAINED, in_progress)
        else:
            yield from _left(outcome, in_progress.reason or STOPPED)
    for outcome in outcomes:
        yield from _left(outcome, STOPPED)


def _left(outcome: GroupOutcome, reason: str) -> Iterator[Entry]:
    yield from _failed(outcome.failed)
    for episode in outcome.finished:
        yield Entry(episode, (), Outcome.DROPPED, reason)


def outcomes_of(entries: Iterable[Entry]) -> list[GroupOutcome]:
    """The groups of a step, in their order: the inverse of `iteration_entries`, whatever was trained.

    Raises:
        ValueError: an episode belongs to no group, or the run stopped before the step was complete.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        match = _EPISODE.match(entry.episode.id)
        if match is None:
            raise ValueError(f"episode {entry.episode.id} belongs to no group")
        if entry.reason == STOPPED and not entry.verdicts:
            raise ValueError(f"the run stopped before episode {entry.episode.id} was in a complete step")
        groups.setdefault(match["group"], []).append(entry)
    return [_group_outcome(id, group) for id, group in groups.items()]


def groups_of_step(folder: Path, step: int) -> list[Group]:
    """The complete groups of a step, from the journal in the folder of a run.

    Raises:
        ConfigError: its file is missing or damaged.
    """
    path = folder / JOURNAL / f"step_{step:06d}{SUFFIX}"
    try:
        outcomes = outcomes_of(read_journal(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; restore that file.") from None
    return [outcome.group for outcome in outcomes if outcome.group is not None]


def ordinal_of(episode_id: str) -> int | None:
    """The number of the prompt of an episode of a run; None = it is an episode of no prompt."""
    match = _EPISODE.match(episode_id)
    return None if match is None else int(match["ordinal"])


def _group_outcome(id: str, entries: Sequence[Entry]) -> GroupOutcome:
    left = [entry for entry in entries if not entry.in_batch]
    reason = left[0].reason if left else ""
    scored = [entry for entry in entries if entry.verdicts]
    unscored = [entry for entry in entries if not entry.verdicts]
    ended = tuple(e.episode for e in unscored if not e.in_batch or e.reason == BROKEN_GROUP)
    failed = tuple(e.episode for e in unscored if e.in_batch and e.reason != BROKEN_GROUP)
    if not scored:
        return GroupOutcome(None, failed, ended, reason)
    first, episodes = scored[0], tuple(entry.episode for entry in scored)
    verdicts = tuple(verdict for entry in scored for verdict in entry.verdicts)
    task, seed = first.episode.task, first.episode.seed
    group = Group(id, task, seed, episodes, verdicts, first.start_version, first.end_version)
    return GroupOutcome(group, failed, episodes, reason)


def _dropped(outcome: GroupOutcome) -> Iterator[Entry]:
    """A group that was in no batch, complete or not."""
    group = outcome.group
    entry = partial(Entry, outcome=Outcome.DROPPED, reason=outcome.reason, in_batch=False)
    for episode in outcome.finished:
        if group is None:
            yield entry(episode, ())
        else:
            yield entry(
                episode,
                group.verdicts_of(episode),
                start_version=group.start_version,
                end_version=group.end_version,
            )


def _group(group: Group, outcome: Outcome, batch: Iteration | BatchInProgress) -> Iterator[Entry]:
    reason = NO_GRADIENT if has_signal(group) else ZERO_STD
    greedy = {episode.id for episode in group.greedy}
    for episode in group.episodes:
        ids = [RolloutId(episode.id, agent) for agent in episode.trained_agents]
        why = [batch.removed.get(id) for id in ids]
        entry = partial(
            Entry,
            episode,
            group.verdicts_of(episode),
            start_version=group.start_version,
            end_version=group.end_version,
            advantages={id.agent: batch.advantages[id] for id in ids if id in batch.advantages},
        )
        if episode.id in greedy:
            yield entry(Outcome.DROPPED, GREEDY_BASELINE)
            continue
        # An episode of several agents is trained on where one of them is.
        if why and why[0] is not None and None not in why:
            yield entry(Outcome.DROPPED, f"{REMOVED}{why[0]}")
        elif outcome is Outcome.DROPPED:
            yield entry(outcome, reason)
        else:
            yield entry(outcome)


def _failed(episodes: Iterable[Episode]) -> Iterator[Entry]:
    for episode in episodes:
        reason = episode.failure.name if episode.failure else str(episode.ending)
        yield Entry(episode, (), Outcome.DROPPED, reason)
