"""Which groups may start, and which of the complete ones make a batch: the staleness policies.

P groups make a batch, K batches a version of the weights, N is `max_staleness`. A group holds a place from
its start until the weights that it was trained for went out, or until it was dropped; there are
(N + 1) x K x P places, and those of the surplus of over-sampling. So at its start at most one group less is
ahead of a group, which bounds how many versions later it is trained.

Groups are numbered by their prompts' ordinals, which rise in the order of their start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

STALE: Final = "stale"
"""Why a group is dropped that became older than `max_staleness` before it was trained."""


class Straggler(NamedTuple):
    """The oldest group in flight. bypassed: groups that started later and were taken before it (count)."""

    ordinal: int
    bypassed: int


class StalenessPolicy(Protocol):
    """Decides when groups start, and which ones are trained next."""

    @property
    def capacity(self) -> int:
        """Places: groups in flight, waiting, or trained for weights that did not go out yet (count)."""

    @property
    def bound(self) -> int:
        """No token is more versions older than this when it is trained."""

    @property
    def is_on_policy(self) -> bool:
        """Whether each batch is played by the weights that it is trained from: nothing starts before."""

    def select(self, complete: Sequence[int], straggler: Straggler | None) -> list[int] | None:
        """The groups of the next batch; None = it waits for more.

        complete: in the order of their end. straggler: None = nothing is in flight.
        """

    def evict(self, oldest_versions: Mapping[int, int], version: int) -> list[int]:
        """The groups that are too old to be trained while `version` is served.

        oldest_versions: of each group in flight or waiting, the oldest version that it may have tokens of.
        """


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """The sizes that the places follow from.

    max_staleness: in versions. batch_size: groups of a batch. updates: batches of a version. surplus: groups
    of over-sampling beyond a batch (counts).
    """

    max_staleness: int
    batch_size: int
    updates: int = 1
    surplus: int = 0

    @property
    def capacity(self) -> int:
        """How many groups hold a place at most (count)."""
        return (self.max_staleness + 1) * self.updates * self.batch_size + self.surplus

    def bound(self, window: int) -> int:
        """The largest staleness (versions), where `window` - 1 later groups may be taken before a group.

        With one batch a version and without a surplus it is N + ceil((window - 1) / P): at its start
        capacity - 1 groups may be ahead of a group, and window - 1 more are taken before it. At N = 0 without
        a surplus it is 0, whatever the window: the weights go out when no group is left.
        """
        if not self.max_staleness and not self.surplus:
            return 0
        return (self.capacity + window - 2) // (self.updates * self.batch_size)


@dataclass(frozen=True, slots=True)
class Window:
    """Oldest first; where the oldest group is still in flight, later ones may be taken before it.

    width: a group is taken at most while it is among that many groups, counted from the oldest one in
    flight, so at most width - 1 groups pass it. 1 = strictly in the order of start. Nothing is evicted, so
    long episodes are trained as often as they were asked for.

    Source of the bound: torchtitan's design of a windowed FIFO (windowed_fifo.md).
    """

    places: GroupPlaces
    width: int = 1

    @property
    def capacity(self) -> int:
        """See `GroupPlaces`."""
        return self.places.capacity

    @property
    def bound(self) -> int:
        """See `GroupPlaces.bound`."""
        return self.places.bound(self.width)

    @property
    def is_on_policy(self) -> bool:
        """Whether there is no place beyond a batch."""
        return self.bound == 0 and self.places.updates == 1

    def select(self, complete: Sequence[int], straggler: Straggler | None) -> list[int] | None:
        """The oldest complete groups, and no more than the window allows beyond the straggler."""
        allowed = sorted(complete)
        if straggler is not None:
            ahead = sum(ordinal < straggler.ordinal for ordinal in allowed)
            allowed = allowed[: ahead + max(self.width - 1 - straggler.bypassed, 0)]
        size = self.places.batch_size
        return allowed[:size] if len(allowed) >= size else None

    def evict(self, oldest_versions: Mapping[int, int], version: int) -> list[int]:
        """Nothing: the bound follows from the places and the window."""
        del oldest_versions, version
        return []


@dataclass(frozen=True, slots=True)
class ReadyFirst:
    """The first groups to end; those that would be older than `max_staleness` versions are dropped.

    It never waits for a straggler, and so trains long episodes less often than they were asked for.
    """

    places: GroupPlaces

    @property
    def capacity(self) -> int:
        """See `GroupPlaces`."""
        return self.places.capacity

    @property
    def bound(self) -> int:
        """max_staleness."""
        return self.places.max_staleness

    @property
    def is_on_policy(self) -> bool:
        """False: groups go on while others are trained."""
        return False

    def select(self, complete: Sequence[int], straggler: Straggler | None) -> list[int] | None:
        """The first complete ones."""
        del straggler
        size = self.places.batch_size
        return list(complete[:size]) if len(complete) >= size else None

    def evict(self, oldest_versions: Mapping[int, int], version: int) -> list[int]:
        """Groups that may have tokens of a version before `version` - max_staleness."""
        oldest = version - self.places.max_staleness
        return [ordinal for ordinal, first in oldest_versions.items() if first < oldest]
