"""What ranks work on, as far as it matters to whoever starts them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from agentrl.trainer.launch.meeting import Meeting


class RankPlace(NamedTuple):
    """Rank `number` of its trainer. local: its number among the ranks of its machine.

    meeting: where all ranks find each other; None = the worker runs in its driver's own process.
    """

    number: int
    local: int
    meeting: Meeting | None


class Work(Protocol):
    """A plan that every rank is given; it is pickled."""

    @property
    def world_size(self) -> int:
        """Ranks (count)."""

    def working(self, place: RankPlace) -> AbstractContextManager[object]:
        """The worker of one rank, in the process of that rank; its methods are what the driver calls."""
