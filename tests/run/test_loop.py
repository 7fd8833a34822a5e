"""Whatever stops an iteration, its groups are accounted for."""

from __future__ import annotations

import pytest

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.algorithm import build_algorithm
from agentrl.errors import EngineError
from agentrl.records import Journal, Outcome, reconcile
from agentrl.rollout.group import GroupOutcome
from agentrl.run.journal_entries import leftover_entries
from agentrl.run.loop import Loop
from agentrl.types.seams import StepReport
from tests.algorithms.episodes import group

ALGORITHM = build_algorithm(AlgorithmConfig(), max_length=9)


class Took:
    """A producer with one batch, of version 3."""

    version = 3

    async def take(self):
        groups = [group(f"g{n}", [0.0, 1.0]) for n in range(4)]
        return [GroupOutcome(group_, (), group_.episodes) for group_ in groups]


class Breaks:
    """A trainer that breaks at the update of this number, or, after all of them, as it publishes."""

    def __init__(self, at):
        self.at, self.updates = at, 0

    async def update(self, batch):
        if self.updates == self.at:
            raise EngineError("out of memory")
        self.updates += 1
        return StepReport({}, 0)

    async def publish(self, target, *, version):
        raise EngineError("the server is gone")


@pytest.mark.parametrize(("at", "trained"), [(0, set()), (1, {"g0", "g1"}), (2, {"g0", "g1", "g2", "g3"})])
async def test_groups_count_as_trained_from_the_update_on_that_saw_them(tmp_path, at, trained):
    loop = Loop(
        producer=Took(),
        trainer=Breaks(at),
        algorithm=ALGORITHM,
        sink=object(),
        num_steps=2,
    )
    with pytest.raises(EngineError):
        await loop.iterate(0)
    entries = list(leftover_entries([], loop.in_progress))
    async with Journal(tmp_path) as journal:
        await journal.write_step(1, entries)
    books = reconcile(tmp_path, played=8)
    assert books.problems == ()
    trained_in_journal = {
        entry.episode.id.split(".")[0] for entry in entries if entry.outcome is Outcome.TRAINED
    }
    assert trained_in_journal == trained
    assert sum(books.dropped.values()) == 8 - 2 * len(trained)
