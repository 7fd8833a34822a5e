"""The part of a trainer's plan that starting its ranks depends on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from agentrl.trainer.launch.rendezvous import Rendezvous


class RankPlace(NamedTuple):
    """Rank `rank` of its trainer. local_rank: its number among the ranks of its machine.

    rendezvous: the store of all ranks; None = the worker runs in its driver's own process.
    """

    rank: int
    local_rank: int
    rendezvous: Rendezvous | None


class RankPlan(Protocol):
    """The plan that the driver sends every rank; it is pickled."""

    @property
    def world_size(self) -> int:
        """Ranks (count)."""

    def worker(self, place: RankPlace) -> AbstractContextManager[object]:
        """The worker of one rank, in the process of that rank; the driver calls its methods."""
