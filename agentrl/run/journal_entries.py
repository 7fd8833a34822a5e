"""From an iteration to the journal's entries: every episode once, with its outcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from agentrl.algorithms.filters import ZERO_STD, has_signal
from agentrl.observe import Entry, Outcome
from agentrl.rollout.group import GroupOutcome
from agentrl.run.loop import BatchInProgress, Iteration
from agentrl.types import Episode, Group, RolloutId

BROKEN_GROUP = "group_incomplete"
NO_GRADIENT = "zero_advantage"
STOPPED = "run_stopped"
REMOVED = "sample_filter/"
"""Begins the reason of an episode that a filter took out of the loss of its batch."""


def iteration_entries(iteration: Iteration) -> Iterator[Entry]:
    """Trained groups; groups without a gradient; dropped groups; failed episodes with the failure's name."""
    trained = {group.id for group in iteration.trained}
    for outcome in iteration.outcomes:
        yield from _failed(outcome.failed)
        if outcome.group is None:
            for episode in outcome.finished:
                yield Entry(episode, (), Outcome.DROPPED, outcome.reason or BROKEN_GROUP)
        else:
            is_trained = outcome.group.id in trained
            yield from _group(outcome.group, is_trained, outcome.reason, iteration.removed)


def leftover_entries(outcomes: Iterable[GroupOutcome], in_progress: BatchInProgress) -> Iterator[Entry]:
    """Entries of the groups that were left when the run stopped: of the batch in progress, then of the queue.

    Of the batch, only the groups of finished optimizer steps are trained.
    """
    for outcome in in_progress.outcomes:
        if outcome.group is not None and outcome.group.id in in_progress.trained:
            yield from _failed(outcome.failed)
            yield from _group(outcome.group, trained=True, removed=in_progress.removed)
        else:
            yield from _left(outcome, in_progress.reason or STOPPED)
    for outcome in outcomes:
        yield from _left(outcome, STOPPED)


def _left(outcome: GroupOutcome, reason: str) -> Iterator[Entry]:
    yield from _failed(outcome.failed)
    for episode in outcome.finished:
        yield Entry(episode, (), Outcome.DROPPED, reason)


def _group(
    group: Group, trained: bool, dropped: str = "", removed: Mapping[RolloutId, str] = MappingProxyType({})
) -> Iterator[Entry]:
    reason = dropped or (NO_GRADIENT if has_signal(group) else ZERO_STD)
    for episode in group.episodes:
        why = [removed.get(RolloutId(episode.id, agent)) for agent in episode.trained_agents]
        # An episode of several agents is trained on where one of them is.
        if why and why[0] is not None and None not in why:
            yield Entry(episode, group.verdicts_of(episode), Outcome.DROPPED, f"{REMOVED}{why[0]}")
        elif trained:
            yield Entry(episode, group.verdicts_of(episode), Outcome.TRAINED)
        else:
            yield Entry(episode, group.verdicts_of(episode), Outcome.DROPPED, reason)


def _failed(episodes: Iterable[Episode]) -> Iterator[Entry]:
    for episode in episodes:
        reason = episode.failure.name if episode.failure else str(episode.ending)
        yield Entry(episode, (), Outcome.DROPPED, reason)
