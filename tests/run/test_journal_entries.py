from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.records import Entry, Journal, Outcome, read_journal, reconcile
from agentrl.rollout.group import GroupOutcome
from agentrl.run.journal_entries import iteration_entries, leftover_entries, ordinal_of, outcomes_of
from agentrl.run.loop import BatchInProgress, Iteration
from agentrl.types import Ending, Episode, Failure, Group, Limits, RolloutId, Task, Verdict

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


async def test_what_an_over_sampled_batch_left_is_dropped_with_its_reason(tmp_path: Path) -> None:
    taken, late = complete("g0"), replace(complete("g1"), reason="over_sampled")
    cut = GroupOutcome(None, (episode("g2-0", DOWN),), (episode("g2-1"),), "over_sampled")
    assert taken.group
    iteration = Iteration(0, (taken, late, cut), (taken.group,), (), {})
    async with Journal(tmp_path) as journal:
        await journal.write_step(1, iteration_entries(iteration))
    assert reconcile(tmp_path, played=6).dropped == {"over_sampled": 3, "reset_error": 1}


async def test_of_a_trained_group_a_rollout_that_a_filter_took_out_is_dropped(tmp_path: Path) -> None:
    removed = {RolloutId("g0-1"): "truncated"}
    in_progress = BatchInProgress((complete("g0"), complete("g1")), {"g0"}, removed)
    entries = {entry.episode.id: entry for entry in leftover_entries([], in_progress)}
    reasons = {id: entry.reason for id, entry in entries.items()}
    stopped = dict.fromkeys(("g1-0", "g1-1"), "run_stopped")
    assert reasons == {"g0-0": "", "g0-1": "sample_filter/truncated", **stopped}


@pytest.mark.parametrize(("removed", "reason"), [(("a",), ""), (("a", "b"), "sample_filter/long")])
def test_an_episode_of_several_agents_is_trained_where_one_of_them_is(
    removed: tuple[str, ...], reason: str
) -> None:
    agents = ("a", "b", "script")
    played = Episode(
        "g0-0", "E-v0", TASK, 0, Limits(), (), (), Ending.COMPLETED, agents=agents, frozen_agents=("script",)
    )
    verdicts = tuple(Verdict("g0-0", "env", 1.0, agent=agent) for agent in agents)
    group = Group("g0", TASK, 0, (played,), verdicts)
    outcome = GroupOutcome(group, (), (played,))
    reasons = {RolloutId("g0-0", agent): "long" for agent in removed}
    (entry,) = iteration_entries(Iteration(0, (outcome,), (group,), (), {}, removed=reasons))
    assert entry.reason == reason


def facts_of(outcome: GroupOutcome) -> object:
    group = outcome.group
    ids = [[episode.id for episode in episodes] for episodes in (outcome.failed, outcome.finished)]
    return (
        *(ids, outcome.reason, outcome.kept is None),
        group and (group.id, group.task, group.seed, group.start_version, group.end_version, group.verdicts),
    )


async def test_groups_are_read_back_as_they_were_whatever_became_of_them(tmp_path: Path) -> None:
    """`zero_std` is the reason of a group in the batch, and of one that the filter dropped."""
    learned, flat = complete("g0", (episode("g0-1-retry1", DOWN),)), complete("g1", alike=True)
    filtered = replace(complete("g3", (episode("g3-0-retry1", DOWN),), alike=True), reason="zero_std")
    broken = GroupOutcome(None, (episode("g2-0", DOWN),), (episode("g2-1"),))
    lost = GroupOutcome(None, (episode("g4-0", DOWN), episode("g4-1", DOWN)), ())
    assert learned.group
    assert flat.group
    learned = replace(learned, group=replace(learned.group, start_version=7, end_version=8))
    assert filtered.group
    filtered = replace(filtered, group=replace(filtered.group, start_version=1, end_version=3))
    late = GroupOutcome(None, (episode("g5-0", DOWN),), (episode("g5-1"),), "over_sampled")
    outcomes = (learned, flat, broken, filtered, lost, late)
    removed = {RolloutId("g0-0"): "truncated"}
    for iteration in (
        Iteration(0, outcomes, (learned.group,), (flat.group,), {}, removed=removed),
        Iteration(0, outcomes, (), (), {}, recorded=(learned.group, flat.group)),
    ):
        folder = tmp_path / str(len(iteration.recorded))
        async with Journal(folder) as journal:
            path = await journal.write_step(1, iteration_entries(iteration))
        restored = outcomes_of(read_journal(path))
        assert list(map(facts_of, restored)) == list(map(facts_of, outcomes))
    counts = reconcile(folder, played=14)
    assert (counts.problems, counts.recorded) == ((), 4)
    assert counts.dropped == {"zero_std": 2, "reset_error": 6, "group_incomplete": 1, "over_sampled": 1}


def test_a_step_that_the_run_did_not_complete_has_no_groups() -> None:
    entries = list(leftover_entries([complete("g3")], BatchInProgress((complete("g0"),), {"g0"})))
    with pytest.raises(ValueError, match="stopped before episode g3-0"):
        outcomes_of(entries)
    with pytest.raises(ValueError, match="episode x belongs to no group"):
        outcomes_of([Entry(episode("x"), (), Outcome.DROPPED, "reset_error")])
    assert (ordinal_of("g12-3-retry1"), ordinal_of("e12")) == (12, None)
