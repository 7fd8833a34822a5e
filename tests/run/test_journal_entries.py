from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.observe import Journal, Outcome, reconcile
from agentrl.rollout.group import GroupOutcome
from agentrl.run.journal_entries import iteration_entries, leftover_entries
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
