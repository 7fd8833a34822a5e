from __future__ import annotations

from pathlib import Path

from agentrl.observe import Journal, Outcome, reconcile
from agentrl.rollout.group import GroupOutcome
from agentrl.run.journal_entries import iteration_entries, leftover_entries
from agentrl.run.loop import BatchInProgress, Iteration
from agentrl.types import Ending, Episode, Failure, Group, Limits, Task, Verdict

TASK = Task.ask("t", "?")
DOWN = Failure("reset", "error", "the database is down")


def episode(id: str, failure: Failure | None = None) -> Episode:
    ending = Ending.FAILED if failure else Ending.COMPLETED
    return Episode(id, "E-v0", TASK, 0, Limits(), (), (1.0,), ending, failure)


def complete(name: str, failed: tuple[Episode, ...] = (), *, alike: bool = False) -> GroupOutcome:
    episodes = (episode(f"{name}-0"), episode(f"{name}-1"))
    verdicts = tuple(Verdict(e.id, "env", 0.5 if alike else float(k)) for k, e in enumerate(episodes))
    return GroupOutcome(Group(name, TASK, 0, episodes, verdicts), failed, episodes)


async def test_every_episode_of_an_iteration_is_booked_once_with_what_became_of_it(tmp_path: Path) -> None:
    learned, flat = complete("g0", (episode("g0-1-retry1", DOWN),)), complete("g1", alike=True)
    broken = GroupOutcome(None, (episode("g2-0", DOWN),), (episode("g2-1"),))
    assert learned.group
    assert flat.group
    iteration = Iteration(0, (learned, flat, broken), (learned.group,), (flat.group,), {})
    entries = list(iteration_entries(iteration))
    async with Journal(tmp_path) as journal:
        await journal.write_step(1, entries)
    books = reconcile(tmp_path, played=7)
    assert not books.problems
    assert books.trained == 2
    assert books.dropped == {"zero_std": 2, "reset_error": 2, "group_incomplete": 1}
    assert {e.episode.id for e in entries if e.outcome is Outcome.TRAINED} == {"g0-0", "g0-1"}


async def test_what_had_ended_when_a_run_stopped_is_booked_as_dropped(tmp_path: Path) -> None:
    ended = [complete("g0", (episode("g0-0-retry1", DOWN),))]
    async with Journal(tmp_path) as journal:
        await journal.write_step(1, leftover_entries(ended, BatchInProgress()))
    books = reconcile(tmp_path, played=3)
    assert not books.problems
    assert books.trained == 0
    assert books.dropped == {"run_stopped": 2, "reset_error": 1}


async def test_of_the_batch_in_hand_those_groups_are_trained_that_were_seen(tmp_path: Path) -> None:
    broken = GroupOutcome(None, (episode("g2-0", DOWN),), (episode("g2-1"),))
    in_progress = BatchInProgress(
        (complete("g0", (episode("g0-1-retry1", DOWN),)), complete("g1"), broken), {"g0"}
    )
    entries = list(leftover_entries([complete("g3")], in_progress))
    async with Journal(tmp_path) as journal:
        await journal.write_step(1, entries)
    books = reconcile(tmp_path, played=9)
    assert not books.problems
    assert books.dropped == {"run_stopped": 5, "reset_error": 2}
    assert {e.episode.id for e in entries if e.outcome is Outcome.TRAINED} == {"g0-0", "g0-1"}
