"""Groups of earlier batches, kept to be trained on once more (experience replay)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.algorithms.filters import BufferFilter, chosen_ids
from agentrl.errors import ConfigError, StageError, UserError
from agentrl.rollout.config import RolloutConfig
from agentrl.runtime.stage import stage
from agentrl.types import Group

Saved = tuple[tuple[int, str], ...]
"""The step that played each group, and its id: the journal has the rest."""


class Kept(NamedTuple):
    """A group, and the step in which it was played and trained on."""

    step: int
    group: Group


@dataclass(slots=True)
class DataBuffer:
    """At most `size` groups, the oldest first; each batch takes `number` of them out of it.

    choose: which; None = the oldest.
    """

    size: int
    number: int
    choose: BufferFilter | None = None
    kept: list[Kept] = field(default_factory=list)

    @classmethod
    def of(cls, config: RolloutConfig, choose: BufferFilter | None) -> DataBuffer | None:
        """An empty one; None = nothing would be taken from it."""
        number = config.data_buffer_groups
        return cls(config.data_buffer_size, number, choose) if number else None

    async def take(self) -> list[Kept]:
        """The groups that the next batch trains on, which leave the buffer; fewer while it holds fewer.

        Raises:
            UserError: the function that chooses failed.
        """
        groups, number = [kept.group for kept in self.kept], min(self.number, len(self.kept))
        ids = frozenset(group.id for group in groups[:number])
        if self.choose is not None and number:
            try:
                async with stage("filter", None):
                    ids = chosen_ids(self.choose, groups, number)
            except StageError as error:
                raise UserError(f"the data buffer's filter failed ({error.detail}); mend it.") from error
        taken = [kept for kept in self.kept if kept.group.id in ids]
        self.kept = [kept for kept in self.kept if kept.group.id not in ids]
        return taken

    def add(self, step: int, groups: Iterable[Group]) -> None:
        """Keep the groups of a step; the oldest ones make room."""
        self.kept += [Kept(step, group) for group in groups]
        del self.kept[: max(len(self.kept) - self.size, 0)]

    @property
    def saved(self) -> Saved:
        """What a checkpoint has of it."""
        return tuple((step, group.id) for step, group in self.kept)

    def restore(self, saved: Saved, groups_of: Callable[[int], Iterable[Group]]) -> None:
        """Hold what a checkpoint had. groups_of: the groups of a step, as the journal has them.

        Raises:
            ConfigError: the journal lacks one.
        """
        steps = sorted({step for step, _ in saved})
        found = {(step, group.id): group for step in steps for group in groups_of(step)}
        if missing := [place for place in saved if place not in found]:
            step, id = missing[0]
            raise ConfigError(f"the journal lacks group {id} of step {step}; restore its files.")
        self.kept = [Kept(step, found[step, id]) for step, id in saved]


def data_buffer_metrics(taken: Sequence[Kept], buffer: DataBuffer, *, step: int) -> dict[str, float]:
    """Groups that the batch of a step took from the buffer, their mean age (steps), and how many it holds."""
    age = sum(step - kept.step for kept in taken) / len(taken) if taken else 0.0
    return {
        "rollout/data_buffer/groups": float(len(taken)),
        "rollout/data_buffer/age": age,
        "rollout/data_buffer/size": float(len(buffer.kept)),
    }
