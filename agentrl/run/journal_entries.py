"""From an iteration to the journal's entries: every episode once, with its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentrl.algorithms.filters import ZERO_STD, has_signal
from agentrl.observe import Entry, Outcome
from agentrl.rollout.group import GroupOutcome
from agentrl.run.loop import BatchInProgress, Iteration
from agentrl.types import Episode, Group

BROKEN_GROUP = "group_incomplete"
NO_GRADIENT = "zero_advantage"
STOPPED = "run_stopped"


def iteration_entries(iteration: Iteration) -> Iterator[Entry]:
    """Trained groups; groups without a gradient; broken groups; failed episodes with their failure's name."""
    trained = {group.id for group in iteration.trained}
    for outcome in iteration.outcomes:
        yield from _failed(outcome.failed)
        if outcome.group is None:
            for episode in outcome.finished:
                yield Entry(episode, (), Outcome.DROPPED, BROKEN_GROUP)
        else:
            yield from _group(outcome.group, outcome.group.id in trained, outcome.reason)


def leftover_entries(outcomes: Iterable[GroupOutcome], in_progress: BatchInProgress) -> Iterator[Entry]:
    """Entries of the groups that were left when the run stopped: of the batch in progress, then of the queue.

    Of the batch, only the groups of finished optimizer steps are trained.
    """
    for outcome in in_progress.outcomes:
        if outcome.group is not None and outcome.group.id in in_progress.trained:
            yield from _failed(outcome.failed)
            yield from _group(outcome.group, trained=True)
        else:
            yield from _left(outcome, in_progress.reason or STOPPED)
    for outcome in outcomes:
        yield from _left(outcome, STOPPED)


def _left(outcome: GroupOutcome, reason: str) -> Iterator[Entry]:
    yield from _failed(outcome.failed)
    for episode in outcome.finished:
        yield Entry(episode, (), Outcome.DROPPED, reason)


def _group(group: Group, trained: bool, dropped: str = "") -> Iterator[Entry]:
    reason = dropped or (NO_GRADIENT if has_signal(group) else ZERO_STD)
    for episode in group.episodes:
        if trained:
            yield Entry(episode, group.verdicts_of(episode), Outcome.TRAINED)
        else:
            yield Entry(episode, group.verdicts_of(episode), Outcome.DROPPED, reason)


def _failed(episodes: Iterable[Episode]) -> Iterator[Entry]:
    for episode in episodes:
        reason = episode.failure.name if episode.failure else str(episode.ending)
        yield Entry(episode, (), Outcome.DROPPED, reason)
