"""Which player plays which group, and how often a group's player has ended."""

from __future__ import annotations

from collections import Counter

MAX_ENDS = 3
"""Players that may end while they play one group, or before they play any, until the run ends (count)."""


class Dispatch:
    """Each group is at one player, the least loaded one when it starts, until it has ended.

    A player that is not open yet, or whose machine is going away, is away: it gets groups only where all
    are. So one that is slow to start, or hangs there, holds none. size: players (count).
    """

    def __init__(self, size: int) -> None:
        self._groups: list[dict[int, None]] = [{} for _ in range(size)]
        self._ends: Counter[int] = Counter()
        self._early_ends = [0] * size
        self._away = set(range(size))

    def start(self, ordinal: int) -> int:
        """The player of a group that starts: of the least loaded ones the first."""
        player = min(
            range(len(self._groups)), key=lambda number: (number in self._away, len(self._groups[number]))
        )
        self._groups[player][ordinal] = None
        return player

    def end(self, ordinal: int) -> None:
        """The group has ended, or is given up."""
        for groups in self._groups:
            groups.pop(ordinal, None)
        self._ends.pop(ordinal, None)

    def of(self, player: int) -> list[int]:
        """The groups of a player, in the order of their start."""
        return list(self._groups[player])

    def at(self, ordinal: int) -> int | None:
        """The player of a group; None = it has ended."""
        return next((player for player, groups in enumerate(self._groups) if ordinal in groups), None)

    def opened(self, player: int) -> None:
        """The player has its environment."""
        self._early_ends[player] = 0
        self._away.discard(player)

    def avoid(self, player: int) -> None:
        """The player is away until it is opened again; its groups stay with it."""
        self._away.add(player)

    def move(self, ordinal: int, player: int | None = None) -> None:
        """The group goes on at a player; None = the one that a new group would get."""
        for groups in self._groups:
            groups.pop(ordinal, None)
        if player is None:
            self.start(ordinal)
        else:
            self._groups[player][ordinal] = None

    def leave(self, player: int) -> None:
        """The player is away until it is opened again: its groups go to others."""
        self.avoid(player)
        groups, self._groups[player] = self._groups[player], {}
        for ordinal in groups:
            self.start(ordinal)

    def lost(self, player: int, *, was_open: bool) -> bool:
        """The player's process has ended: it is away, and its groups stay with it. Whether another process
        may start."""
        self.avoid(player)
        groups = self.of(player)
        self._early_ends[player] += not was_open
        if was_open:
            self._ends.update(groups)
        number = max([self._early_ends[player], *(self._ends[ordinal] for ordinal in groups)])
        return number < MAX_ENDS
